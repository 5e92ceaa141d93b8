// SPDX-License-Identifier: Apache-2.0
#include "lookup_function.h"

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>

#include "leaves.h"
#include "ops.h"
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
  std::vector<int64_t> dimensions;
  for (const at::Tensor& table : tables) dimensions.push_back(table.size(1));
  return op.call(optional, tables, list.names(), list.owners(), list.num_rows(), dimensions, 1, 0, lookups.keys,
                 lookups.key_tables, lookups.combiners, lookups.row_splits, lookups.bagged, lookups.weights,
                 lookups.weighted, std::nullopt, std::nullopt);
}

void refuse_second_order(const at::Tensor& gradient) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !at::GradMode::is_enabled() || !gradient.defined() || !gradient.requires_grad(),
      "the gradient of a lookup cannot be differentiated again (create_graph=True goes through lookup_sparse); detach "
      "the looked-up vectors, or take second derivatives of the other inputs only");
}

// The mirror of gather_combine. Its inputs are the tables, then the weights.
class LookupBackward final : public autograd::Node {
 public:
  // concat: there is one output, with those of all lookups side by side.
  LookupBackward(c10::intrusive_ptr<TableList> list, std::vector<at::Tensor> tables, LookupLists lookups, bool concat)
      : list_(std::move(list)), tables_(std::move(tables)), lookups_(std::move(lookups)), concat_(concat) {
    set_next_edges(autograd::collect_next_edges(tables_, lookups_.weights));
    keep(&lookups_.keys);
    keep(&lookups_.row_splits);
    bool rows_are_read = false;  // again, for the gradient of the weights; else tables may change before backward()
    for (const at::Tensor& weight : lookups_.weights) rows_are_read |= weight.requires_grad();
    keep(&lookups_.weights);
    if (rows_are_read) {
      for (const at::Tensor& table : tables_) kept_.emplace_back(table, /*is_output=*/false);
    }
  }

  std::string name() const override { return "LookupBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.clear();
    released_ = true;
    if (!unvisited_.empty()) next_edges_ = std::move(unvisited_);
    unvisited_.clear();
  }

 private:
  // Moves tensors to where autograd notices that they are written to.
  void keep(std::vector<at::Tensor>* tensors) {
    for (const at::Tensor& tensor : *tensors) kept_.emplace_back(tensor, /*is_output=*/false);
    tensors->clear();
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const at::Tensor& gradient : gradients) refuse_second_order(gradient);
    TORCH_CHECK(!released_, autograd::ERR_BACKWARD_TWICE);
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
    const size_t num_tables = tables_.size(), num_weights = lookups.weights.size();
    variable_list of_weights(num_weights);
    for (size_t i = 0; i < num_weights; ++i) {
      if (task_should_compute_output(num_tables + i)) {
        of_weights = weight_gradient_of(*list_, lookups, gradients, take(num_tables));
        break;
      }
    }
    variable_list result =
        deliver(c10::make_intrusive<LookupDelivery>(list_, std::move(lookups), std::move(gradients)));
    if (result.empty()) return result;
    for (at::Tensor& gradient : of_weights) result.push_back(std::move(gradient));
    return result;
  }

  // The gradient of each lookup's columns.
  variable_list of_lookups(const at::Tensor& gradient) const {
    if (!gradient.defined()) return variable_list(lookups_.key_tables.size());
    std::vector<int64_t> widths;
    widths.reserve(lookups_.key_tables.size());
    for (const int64_t table : lookups_.key_tables) widths.push_back(tables_[table].size(1));
    return columns_of(gradient, widths);
  }

  // Gives the tables their gradients. Returns those that autograd has to carry, one entry a table; nothing where it
  // need not visit the tables' leaves at all.
  variable_list deliver(const c10::intrusive_ptr<LookupDelivery>& delivery) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("sok::deliver", "")
                               .typed<std::vector<at::Tensor>(const c10::intrusive_ptr<LookupDelivery>&, at::TensorList,
                                                              at::IntArrayRef, at::IntArrayRef)>();
    std::vector<int64_t> by_autograd, delivered;
    bool only_leaves = post_hooks().empty() && !autograd::get_current_graph_task_keep_graph();
    for (size_t i = 0; i < tables_.size(); ++i) {
      if (!task_should_compute_output(i)) continue;
      const bool on_its_way = carried(tables_[i]);
      only_leaves &= !on_its_way;
      if (delivery->reaches(i)) (on_its_way ? by_autograd : delivered).push_back(static_cast<int64_t>(i));
    }
    for (size_t i = tables_.size(); i < num_outputs(); ++i) only_leaves &= !next_edge(i).is_valid();
    std::vector<at::Tensor> gradients;
    if (!by_autograd.empty() || !delivered.empty()) {
      const at::NoGradGuard no_grad;
      gradients = op.call(delivery, tables_, delivered, by_autograd);
    }
    if (only_leaves && nothing_else_leads_to(next_edges())) {
      // Autograd takes a microsecond for a leaf that gets nothing. Without edges this node is the end of the graph;
      // release_variables(), which follows at once, puts them back.
      unvisited_.swap(next_edges_);
      return variable_list();
    }
    variable_list result(tables_.size());
    for (size_t j = 0; j < by_autograd.size(); ++j) result[by_autograd[j]] = std::move(gradients.at(j));
    return result;
  }

  c10::intrusive_ptr<TableList> list_;
  std::vector<at::Tensor> tables_;
  LookupLists lookups_;                        // without tensors
  std::vector<autograd::SavedVariable> kept_;  // keys, row splits, weights, and tables if weights have gradients
  autograd::edge_list unvisited_;
  bool concat_;
  bool released_ = false;
};

// Nodes are held by intrusive_ptr since PyTorch 2.10 or so, before by shared_ptr.
template <typename Node, typename... Arguments>
auto make_node(Arguments&&... arguments) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
  } else {
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  }
}

bool any_requires_grad(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.requires_grad()) return true;
  }
  return false;
}

}  // namespace

std::vector<int64_t> carried_by_autograd(at::TensorList tables) {
  std::vector<int64_t> result;
  for (size_t i = 0; i < tables.size(); ++i) {
    if (tables[i].requires_grad() && carried(tables[i])) result.push_back(static_cast<int64_t>(i));
  }
  return result;
}

void first_order_only(const OptionalTensors& gradients) {
  for (const std::optional<at::Tensor>& gradient : gradients.vec()) {
    refuse_second_order(gradient.value_or(at::Tensor()));
  }
}

std::vector<at::Tensor> lookup(const c10::intrusive_ptr<TableList>& list, std::vector<at::Tensor> keys,
                               std::vector<int64_t> combiners, std::vector<at::Tensor> row_splits,
                               std::vector<int64_t> bagged, std::vector<at::Tensor> weights,
                               std::vector<int64_t> weighted, bool concat) {
  std::vector<at::Tensor> tables = list->tables();
  LookupLists lookups{std::move(keys),   list->positions(),  std::move(combiners), std::move(row_splits),
                      std::move(bagged), std::move(weights), std::move(weighted)};
  if (!at::GradMode::is_enabled() || !(any_requires_grad(tables) || any_requires_grad(lookups.weights))) {
    return gather_combine_below_autograd(tables, *list, lookups, concat);
  }
  if (const auto& transforms = at::functorch::functorchTLSAccessor()) transforms->checkSupportsCppAutogradFunction();
  for (const std::vector<at::Tensor>* inputs : {&tables, &lookups.weights}) {
    TORCH_CHECK_NOT_IMPLEMENTED(!autograd::isFwGradDefinedTensorList(*inputs),
                                "lookup_sparse has no forward-mode derivative");
  }
  std::vector<at::Tensor> outputs = gather_combine_below_autograd(tables, *list, lookups, concat);
  autograd::set_history(outputs, make_node<LookupBackward>(list, std::move(tables), std::move(lookups), concat));
  return outputs;
}

std::optional<std::vector<at::Tensor>> lookup_pairs(const c10::intrusive_ptr<TableList>& list,
                                                    std::vector<at::Tensor> keys, std::vector<at::Tensor> row_splits,
                                                    std::vector<int64_t> combiners, at::Device device, bool concat) {
  if (!plain_pairs(keys, row_splits, device)) return std::nullopt;
  std::vector<int64_t> every(keys.size());
  std::iota(every.begin(), every.end(), 0);
  return lookup(list, std::move(keys), std::move(combiners), std::move(row_splits), std::move(every), {}, {}, concat);
}

}  // namespace sok_torch
