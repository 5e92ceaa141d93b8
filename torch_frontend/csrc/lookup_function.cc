// SPDX-License-Identifier: Apache-2.0
// The lookup of a process alone as a function of autograd: gather_combine, and its gradient, which is delivered to the
// tables in one piece (../delivery.py).
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "lookup_function.h"

namespace sok_torch {
namespace {

namespace autograd = torch::autograd;
using autograd::variable_list;

std::vector<at::Tensor> gather_combine_below_autograd(at::TensorList tables, const TableList& list,
                                                      const LookupLists& lookups) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("sok::gather_combine", "")
                             .typed<decltype(sok_torch::gather_combine)>();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(tables, list.names(), list.owners(), list.num_rows(), lookups.keys, lookups.key_tables,
                 lookups.combiners, lookups.row_splits, lookups.bagged, lookups.weights, lookups.weighted);
}

// Whether the running backward() adds to the .grad of a leaf. (autograd.grad() does not.)
bool accumulates(autograd::Node* leaf) {
  const auto* nodes = autograd::get_current_graph_task_exec_info();
  if (nodes == nullptr) return false;
  if (nodes->empty()) return true;
  const auto found = nodes->find(leaf);
  return found != nodes->end() && found->second.needed_ && !found->second.captures_;
}

// Whether autograd has to carry the gradient of a table: somebody waits for it on the way, or takes it away.
bool carried(const at::Tensor& table) {
  if (!autograd::impl::hooks(table).empty() || autograd::impl::post_acc_grad_hooks(table) != nullptr) return true;
  const auto leaf = autograd::impl::try_get_grad_accumulator(table);
  return leaf == nullptr || !leaf->pre_hooks().empty() || !leaf->post_hooks().empty() || !accumulates(leaf.get());
}

void refuse_second_order(const at::Tensor& gradient) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !at::GradMode::is_enabled() || !gradient.defined() || !gradient.requires_grad(),
      "the gradient of a lookup cannot be differentiated again (create_graph=True goes through lookup_sparse); detach "
      "the looked-up vectors, or take second derivatives of the other inputs only");
}

// What the gradient needs beside the tensors that autograd keeps.
struct Call final : torch::CustomClassHolder {
  c10::intrusive_ptr<TableList> list;
  std::vector<at::Tensor> tables;
  LookupLists lookups;  // without tensors
};

variable_list weight_gradient_of(const Call& call, const LookupLists& lookups, const variable_list& gradients,
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
  return op.call(optional, tables, call.list->names(), call.list->owners(), call.list->num_rows(), dimensions, 1, 0,
                 lookups.keys, lookups.key_tables, lookups.combiners, lookups.row_splits, lookups.bagged,
                 lookups.weights, lookups.weighted, std::nullopt, std::nullopt);
}

// Gives the tables named in `needed` their gradients; returns those that autograd has to carry, one entry a table.
variable_list hand_over(const c10::intrusive_ptr<LookupDelivery>& delivery, const std::vector<at::Tensor>& tables,
                        const std::vector<int64_t>& needed) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("sok::deliver", "")
                             .typed<std::vector<at::Tensor>(const c10::intrusive_ptr<LookupDelivery>&, at::TensorList,
                                                            at::IntArrayRef, at::IntArrayRef)>();
  variable_list result(tables.size());
  if (needed.empty()) return result;
  std::vector<int64_t> by_autograd, delivered;
  for (const int64_t i : needed) (carried(tables[i]) ? by_autograd : delivered).push_back(i);
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> gradients = op.call(delivery, tables, delivered, by_autograd);
  for (size_t j = 0; j < by_autograd.size(); ++j) result[by_autograd[j]] = gradients.at(j);
  return result;
}

class LookupFunction final : public autograd::Function<LookupFunction> {
 public:
  static variable_list forward(autograd::AutogradContext* context, const c10::intrusive_ptr<Call>& call,
                               at::TensorList tables, at::TensorList weights) {
    LookupLists& lookups = call->lookups;
    variable_list outputs = gather_combine_below_autograd(tables, *call->list, lookups);
    context->set_materialize_grads(false);
    variable_list kept = std::move(lookups.keys);
    kept.insert(kept.end(), lookups.row_splits.begin(), lookups.row_splits.end());
    kept.insert(kept.end(), weights.begin(), weights.end());
    // Rows are read again for the gradient of the weights alone; otherwise the table may change before backward().
    for (const at::Tensor& weight : weights) {
      if (weight.requires_grad()) {
        kept.insert(kept.end(), tables.begin(), tables.end());
        break;
      }
    }
    context->save_for_backward(std::move(kept));
    lookups.keys.clear();
    lookups.row_splits.clear();
    lookups.weights.clear();
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return outputs;
  }

  static variable_list backward(autograd::AutogradContext* context, variable_list gradients) {
    for (const at::Tensor& gradient : gradients) refuse_second_order(gradient);
    const auto holder = context->saved_data["call"].toCapsule();
    const Call& call = static_cast<const Call&>(*holder);
    const variable_list kept = context->get_saved_variables();
    LookupLists lookups = call.lookups;
    auto next = kept.begin();
    const auto take = [&next](size_t count) {
      next += static_cast<int64_t>(count);
      return variable_list(next - static_cast<int64_t>(count), next);
    };
    lookups.keys = take(lookups.key_tables.size());
    lookups.row_splits = take(lookups.bagged.size());
    lookups.weights = take(lookups.weighted.size());
    const size_t num_tables = call.tables.size(), num_weights = lookups.weights.size();

    variable_list result(1);  // of `call`
    variable_list of_weights(num_weights);
    for (size_t i = 0; i < num_weights; ++i) {
      if (context->needs_input_grad(num_tables + i)) {
        of_weights = weight_gradient_of(call, lookups, gradients, take(num_tables));
        break;
      }
    }
    const auto delivery = c10::make_intrusive<LookupDelivery>(call.list, std::move(lookups), std::move(gradients));
    std::vector<int64_t> needed;
    for (size_t i = 0; i < num_tables; ++i) {
      if (delivery->reaches(i) && context->needs_input_grad(i)) needed.push_back(static_cast<int64_t>(i));
    }
    for (at::Tensor& gradient : hand_over(delivery, call.tables, needed)) result.push_back(std::move(gradient));
    for (at::Tensor& gradient : of_weights) result.push_back(std::move(gradient));
    return result;
  }
};

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

std::vector<at::Tensor> lookup(const c10::intrusive_ptr<TableList>& list, std::vector<at::Tensor> keys,
                               std::vector<int64_t> key_tables, std::vector<int64_t> combiners,
                               std::vector<at::Tensor> row_splits, std::vector<int64_t> bagged,
                               std::vector<at::Tensor> weights, std::vector<int64_t> weighted) {
  const std::vector<at::Tensor> tables = list->tables();
  LookupLists lookups{std::move(keys),   std::move(key_tables), std::move(combiners), std::move(row_splits),
                      std::move(bagged), std::move(weights),    std::move(weighted)};
  if (!at::GradMode::is_enabled() || !(any_requires_grad(tables) || any_requires_grad(lookups.weights))) {
    return gather_combine_below_autograd(tables, *list, lookups);
  }
  const std::vector<at::Tensor> inputs = lookups.weights;
  auto call = c10::make_intrusive<Call>();
  call->list = list;
  call->tables = tables;
  call->lookups = std::move(lookups);
  return LookupFunction::apply(call, at::TensorList(tables), at::TensorList(inputs));
}

void first_order_only(const OptionalTensors& gradients) {
  for (const std::optional<at::Tensor>& gradient : gradients.vec())
    refuse_second_order(gradient.value_or(at::Tensor()));
}

}  // namespace sok_torch
