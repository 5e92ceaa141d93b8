// SPDX-License-Identifier: Apache-2.0
#include "lookup_function.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <numeric>
#include <string>
#include <utility>

#include "delivering_node.h"
#include "ops.h"
#include "sharded_lookup.h"
#include "views.h"

namespace sok_torch {
namespace {

namespace autograd = torch::autograd;
using autograd::variable_list;

std::vector<at::Tensor> gather_combine_below_autograd(at::TensorList tables, const TableList& list,
                                                      const LookupLists& lookups, bool concat) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("sok::gather_combine", "")
                             .typed<decltype(sok_torch::gather_combine)>();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(tables, list.names(), list.owners(), list.num_rows(), lookups.keys, lookups.key_tables,
                 lookups.combiners, lookups.row_splits, lookups.bagged, lookups.weights, lookups.weighted, concat);
}

variable_list weight_gradient_of(const TableList& list, const LookupLists& lookups, const variable_list& gradients,
                                 at::TensorList tables) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("sok::weight_gradient", "")
                             .typed<decltype(sok_torch::weight_gradient)>();
  OptionalTensors optional;
  for (const at::Tensor& gradient : gradients) {
    optional.push_back(gradient.defined() ? std::optional<at::Tensor>(gradient) : std::nullopt);
  }
  return op.call(optional, tables, list.names(), list.owners(), list.num_rows(), lookups.keys, lookups.key_tables,
                 lookups.combiners, lookups.row_splits, lookups.bagged, lookups.weights, lookups.weighted);
}

// The mirror of gather_combine.
class LookupBackward final : public DeliveringNode {
 public:
  // concat: there is one output, with those of all lookups side by side.
  LookupBackward(c10::intrusive_ptr<TableList> list, std::vector<at::Tensor> tables, LookupLists lookups, bool concat)
      : DeliveringNode(std::move(tables), lookups.weights),
        list_(std::move(list)),
        lookups_(std::move(lookups)),
        concat_(concat) {
    keep(&lookups_.keys);
    keep(&lookups_.row_splits);
    bool rows_are_read = false;  // again, for the gradient of the weights; else tables may change before backward()
    for (const at::Tensor& weight : lookups_.weights) rows_are_read |= weight.requires_grad();
    keep(&lookups_.weights);
    if (rows_are_read) {
      for (const at::Tensor& table : this->tables()) kept_.emplace_back(table, /*is_output=*/false);
    }
  }

  std::string name() const override { return "LookupBackward"; }

 private:
  // Moves tensors to where autograd notices that they are written to.
  void keep(std::vector<at::Tensor>* tensors) {
    for (const at::Tensor& tensor : *tensors) kept_.emplace_back(tensor, /*is_output=*/false);
    tensors->clear();
  }

  variable_list differentiate(variable_list&& gradients) override {
    if (concat_) gradients = of_lookups(gradients.at(0));
    auto next = kept_.begin();
    const auto take = [&next](size_t count) {
      variable_list result;
      result.reserve(count);
      for (size_t i = 0; i < count; ++i, ++next) result.push_back(next->unpack());
      return result;
    };
    LookupLists lookups = lookups_;
    lookups.keys = take(lookups.key_tables.size());
    lookups.row_splits = take(lookups.bagged.size());
    lookups.weights = take(lookups.weighted.size());
    variable_list of_weights;
    if (leads_to_weights()) of_weights = weight_gradient_of(*list_, lookups, gradients, take(tables().size()));
    const auto delivery = c10::make_intrusive<LookupDelivery>(list_, std::move(lookups), std::move(gradients));
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("sok::deliver", "")
                               .typed<std::vector<at::Tensor>(const c10::intrusive_ptr<LookupDelivery>&, at::TensorList,
                                                              at::IntArrayRef, at::IntArrayRef)>();
    return deliver([&](size_t table) { return delivery->reaches(table); },
                   [&](at::IntArrayRef delivered, at::IntArrayRef carried) {
                     return op.call(delivery, tables(), delivered, carried);
                   },
                   std::move(of_weights));
  }

  void release() override { kept_.clear(); }

  // The gradient of each lookup's columns.
  variable_list of_lookups(const at::Tensor& gradient) const {
    if (!gradient.defined()) return variable_list(lookups_.key_tables.size());
    std::vector<int64_t> widths;
    widths.reserve(lookups_.key_tables.size());
    for (const int64_t table : lookups_.key_tables) widths.push_back(tables()[table].size(1));
    return columns_of(gradient, widths);
  }

  c10::intrusive_ptr<TableList> list_;
  LookupLists lookups_;                        // without tensors
  std::vector<autograd::SavedVariable> kept_;  // keys, row splits, weights, and tables if weights have gradients
  bool concat_;
};

}  // namespace

std::vector<at::Tensor> lookup(const c10::intrusive_ptr<TableList>& list, std::vector<at::Tensor> keys,
                               std::vector<int64_t> combiners, std::vector<at::Tensor> row_splits,
                               std::vector<int64_t> bagged, std::vector<at::Tensor> weights,
                               std::vector<int64_t> weighted, bool concat, std::optional<int64_t> exchange) {
  LookupLists lookups{std::move(keys),   list->positions(),  std::move(combiners), std::move(row_splits),
                      std::move(bagged), std::move(weights), std::move(weighted)};
  if (exchange.has_value()) return sharded_lookup(list, std::move(lookups), concat, Exchange::find(*exchange));
  std::vector<at::Tensor> tables = list->tables();
  const bool recorded = is_recorded(tables, lookups.weights);
  std::vector<at::Tensor> outputs = gather_combine_below_autograd(tables, *list, lookups, concat);
  if (recorded) {
    autograd::set_history(outputs, make_node<LookupBackward>(list, std::move(tables), std::move(lookups), concat));
  }
  return outputs;
}

std::optional<std::vector<at::Tensor>> lookup_pairs(const c10::intrusive_ptr<TableList>& list,
                                                    std::vector<at::Tensor> keys, std::vector<at::Tensor> row_splits,
                                                    std::vector<int64_t> combiners, at::Device device, bool concat,
                                                    std::optional<int64_t> exchange) {
  if (!plain_pairs(keys, row_splits, device)) return std::nullopt;
  std::vector<int64_t> every(keys.size());
  std::iota(every.begin(), every.end(), 0);
  return lookup(list, std::move(keys), std::move(combiners), std::move(row_splits), std::move(every), {}, {}, concat,
                exchange);
}

}  // namespace sok_torch
