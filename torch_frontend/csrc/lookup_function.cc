// SPDX-License-Identifier: Apache-2.0
#include "lookup_function.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "call_gradient.h"
#include "indexed_table.h"
#include "located_tables.h"
#include "lookup_node.h"
#include "lookups.h"
#include "ops.h"
#include "sharded_function.h"
#include "views.h"

namespace sok_torch {
namespace {

std::vector<at::Tensor> gather_combine_below_autograd(at::TensorList tables, const TableList& list,
                                                      const LookupLists& lookups, bool concat, at::IntArrayRef by_key) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("sok::gather_combine", "")
                             .typed<decltype(sok_torch::gather_combine)>();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(tables, list.names(), lookups.keys, lookups.key_tables, lookups.combiners, lookups.row_splits,
                 lookups.bagged, lookups.weights, lookups.weighted, concat, list.num_members(), by_key);
}

// A call of a process alone. Its tables' gradients are the output gradients as they are, with the lookups they belong
// to, whose keys are slots.
class LocalLookup final : public RecordedLookup {
 public:
  // concat: there is one output, with those of all lookups side by side.
  // generations: those of slots that were located, a table; empty where slots are keys.
  LocalLookup(c10::intrusive_ptr<TableList> list, at::TensorList tables, LookupLists lookups, bool concat,
              std::vector<int64_t> generations)
      : list_(std::move(list)),
        lookups_(std::move(lookups)),
        kept_(lookups_.borrow()),
        concat_(concat),
        generations_(std::move(generations)) {
    widths_.reserve(lookups_.key_tables.size());
    for (size_t i = 0; i < lookups_.key_tables.size(); ++i) {
      widths_.push_back(tables[lookups_.key_tables[i]].size(1) * std::max<int64_t>(1, members_of(i)));
    }
    bool rows_are_read = false;  // again, for the gradient of the weights; else tables may change before backward()
    for (const at::Tensor& weight : lookups_.weights) rows_are_read |= weight.requires_grad();
    if (rows_are_read) {
      tables_ = tables.vec();
      kept_.add(tables_);
    }
  }

  const char* name() const override { return "LookupBackward"; }

  Gradients backward(std::vector<at::Tensor> gradients, bool of_tables, bool of_weights) override {
    check_unchanged(kept_);
    Gradients result;
    if (of_tables) result.of_tables = concat_ ? of_columns(gradients.at(0)) : of_outputs(gradients);
    if (of_weights) {
      OptionalTensors optional;
      if (concat_ && gradients.at(0).defined()) gradients = columns_of(gradients[0], widths_);
      gradients.resize(widths_.size());
      for (const at::Tensor& gradient : gradients) {
        optional.push_back(gradient.defined() ? std::optional<at::Tensor>(gradient) : std::nullopt);
      }
      result.of_weights = weight_gradient(optional, tables_, list_->names(), lookups_.keys, lookups_.key_tables,
                                          lookups_.combiners, lookups_.row_splits, lookups_.bagged, lookups_.weights,
                                          lookups_.weighted, generations_, list_->num_members());
    }
    return result;
  }

  void release() override {
    lookups_.release();
    kept_.clear();
    tables_.clear();
  }

 private:
  int64_t members_of(size_t lookup) const {
    const at::IntArrayRef counts = list_->num_members();
    return counts.empty() ? 0 : counts[lookup];
  }

  c10::intrusive_ptr<CallGradient> of_outputs(const std::vector<at::Tensor>& gradients) const {
    Borrowed tensors;
    std::vector<sok_tensor> values(gradients.size(), kAbsent);
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) values[i] = borrow(gradients[i], &tensors);
    }
    return with_lookups(values, std::move(tensors));
  }

  c10::intrusive_ptr<CallGradient> of_columns(const at::Tensor& gradient) const {
    Borrowed tensors;
    std::vector<sok_tensor> values(widths_.size(), kAbsent);
    if (gradient.defined()) {
      sok_tensor columns = borrow(gradient, &tensors);
      if (columns.row_stride == 0) columns.row_stride = columns.shape[1];
      for (size_t i = 0; i < widths_.size(); ++i) {
        columns.shape[1] = widths_[i];
        values[i] = columns;
        if (columns.data != nullptr) columns.data = static_cast<float*>(columns.data) + widths_[i];
      }
    }
    return with_lookups(values, std::move(tensors));
  }

  // A view of the rows of a gradient, copied only where they are not contiguous.
  static sok_tensor borrow(const at::Tensor& gradient, Borrowed* tensors) {
    std::vector<at::Tensor> copies;
    const sok_tensor result = view_of_rows(gradient, "output gradient", &copies);
    if (copies.empty()) tensors->add(gradient);
    tensors->keep(copies);
    return result;
  }

  c10::intrusive_ptr<CallGradient> with_lookups(const std::vector<sok_tensor>& values, Borrowed tensors) const {
    LookupLists lookups = lookups_;
    lookups.copy_buffers();
    tensors.add(lookups.keys);
    tensors.add(lookups.row_splits);
    tensors.add(lookups.weights);
    std::vector<at::Tensor> copies;
    std::vector<CallGradient::Summand> all;
    all.reserve(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      sok_gradient summand = SOK_GRADIENT_INIT;
      summand.combiner = static_cast<int32_t>(lookups.combiners[i]);
      summand.slots = view(lookups.keys[i], "keys", &copies);
      summand.values = values[i];
      summand.num_members = static_cast<int32_t>(members_of(i));
      if (!generations_.empty()) summand.generation = generations_[lookups.key_tables[i]];
      all.push_back({static_cast<size_t>(lookups.key_tables[i]), summand});
    }
    for (size_t j = 0; j < lookups.bagged.size(); ++j) {
      all[lookups.bagged[j]].view.row_splits = view(lookups.row_splits[j], "row_splits", &copies);
    }
    for (size_t j = 0; j < lookups.weighted.size(); ++j) {
      all[lookups.weighted[j]].view.weights = view(lookups.weights[j], "weights", &copies);
    }
    tensors.keep(copies);
    std::erase_if(all, [](const CallGradient::Summand& summand) { return summand.view.values.rank == 0; });
    return c10::make_intrusive<CallGradient>(list_->names(), std::move(all), std::move(tensors));
  }

  c10::intrusive_ptr<TableList> list_;
  LookupLists lookups_;
  std::vector<at::Tensor> tables_;  // if weights have gradients
  Borrowed kept_;
  std::vector<int64_t> widths_;  // of each lookup's output
  bool concat_;
  std::vector<int64_t> generations_;
};

}  // namespace

std::vector<at::Tensor> lookup(const c10::intrusive_ptr<TableList>& list, std::vector<at::Tensor> keys,
                               std::vector<int64_t> combiners, std::vector<at::Tensor> row_splits,
                               std::vector<int64_t> bagged, std::vector<at::Tensor> weights,
                               std::vector<int64_t> weighted, bool concat, int64_t training,
                               std::optional<int64_t> exchange, double gradient_scale) {
  LookupLists lookups{std::move(keys),   list->positions(),  std::move(combiners), std::move(row_splits),
                      std::move(bagged), std::move(weights), std::move(weighted)};
  if (exchange.has_value()) {
    return sharded_lookup(list, std::move(lookups), concat, training, Exchange::find(*exchange), gradient_scale);
  }
  const BorrowedTensors borrowed(list->weak());
  at::TensorList tables = borrowed.get();
  std::optional<IndexedTable::Use> use;
  std::optional<LocatedTables> located;
  at::IntArrayRef by_key;
  if (list->indexed()) {
    list->check_keys(lookups.keys);
    use.emplace(tables, training != kEvaluates && at::GradMode::is_enabled());
    tables = located.emplace(locate(*list, tables, &lookups, concat, training)).tables();
    by_key = located->by_key();
  } else if (!list->num_members().empty()) {
    locate_members(*list, tables, &lookups, concat);
  }
  const bool recorded = is_recorded(tables, lookups.weights);
  std::vector<at::Tensor> outputs = gather_combine_below_autograd(tables, *list, lookups, concat, by_key);
  if (recorded) {
    const std::vector<at::Tensor> of_weights = lookups.weights;
    lookups.copy_foreign();
    std::vector<int64_t> generations;
    if (located.has_value()) generations = located->generations();
    auto kept = std::make_unique<LocalLookup>(list, tables, std::move(lookups), concat, std::move(generations));
    record(&outputs, list, tables, of_weights, std::move(kept));
  }
  return outputs;
}

std::optional<std::vector<at::Tensor>> lookup_pairs(const c10::intrusive_ptr<TableList>& list,
                                                    std::vector<at::Tensor> keys, std::vector<at::Tensor> row_splits,
                                                    std::vector<int64_t> combiners, at::Device device, bool concat,
                                                    int64_t training, std::optional<int64_t> exchange,
                                                    double gradient_scale) {
  if (!plain_pairs(keys, row_splits, device)) return std::nullopt;
  std::vector<int64_t> every(keys.size());
  std::iota(every.begin(), every.end(), 0);
  return lookup(list, std::move(keys), std::move(combiners), std::move(row_splits), std::move(every), {}, {}, concat,
                training, exchange, gradient_scale);
}

}  // namespace sok_torch
