// SPDX-License-Identifier: Apache-2.0
#include "delivering_node.h"

#include <ATen/FuncTorchTLS.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "leaves.h"

namespace sok_torch {
namespace {

namespace autograd = torch::autograd;
using autograd::variable_list;

bool any_requires_grad(at::TensorList tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

void refuse_second_order(const at::Tensor& gradient) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !at::GradMode::is_enabled() || !gradient.defined() || !gradient.requires_grad(),
      "the gradient of a lookup cannot be differentiated again (create_graph=True goes through lookup_sparse); detach "
      "the looked-up vectors, or take second derivatives of the other inputs only");
}

}  // namespace

DeliveringNode::DeliveringNode(std::vector<at::Tensor> tables, at::TensorList weights) : tables_(std::move(tables)) {
  set_next_edges(autograd::collect_next_edges(tables_, weights));
}

void DeliveringNode::release_variables() {
  const std::lock_guard<std::mutex> lock(mutex_);
  release();
  released_ = true;
  if (!unvisited_.empty()) next_edges_ = std::move(unvisited_);
  unvisited_.clear();
}

variable_list DeliveringNode::apply(variable_list&& gradients) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const at::Tensor& gradient : gradients) refuse_second_order(gradient);
  TORCH_CHECK(!released_, autograd::ERR_BACKWARD_TWICE);
  return differentiate(std::move(gradients));
}

bool DeliveringNode::leads_to(size_t first, size_t end) const {
  for (size_t i = first; i < end; ++i) {
    if (task_should_compute_output(i)) return true;
  }
  return false;
}

variable_list DeliveringNode::deliver(c10::function_ref<bool(size_t)> reaches, Leave leave,
                                      std::vector<at::Tensor> of_weights) {
  std::vector<int64_t> by_autograd, delivered;
  bool only_leaves = post_hooks().empty() && !autograd::get_current_graph_task_keep_graph();
  for (size_t i = 0; i < tables_.size(); ++i) {
    if (!task_should_compute_output(i)) continue;
    const bool on_its_way = carried(tables_[i]);
    only_leaves &= !on_its_way;
    if (reaches(i)) (on_its_way ? by_autograd : delivered).push_back(static_cast<int64_t>(i));
  }
  for (size_t i = tables_.size(); i < num_outputs(); ++i) only_leaves &= !next_edge(i).is_valid();
  std::vector<at::Tensor> gradients;
  if (!by_autograd.empty() || !delivered.empty()) {
    const at::NoGradGuard no_grad;
    gradients = leave(delivered, by_autograd);
  }
  if (only_leaves && nothing_else_leads_to(next_edges())) {
    // Autograd takes a microsecond for a leaf that gets nothing. Without edges this node is the end of the graph;
    // release_variables(), which follows at once, puts them back.
    unvisited_.swap(next_edges_);
    return variable_list();
  }
  variable_list result(num_outputs());
  for (size_t j = 0; j < by_autograd.size(); ++j) result[by_autograd[j]] = std::move(gradients.at(j));
  for (size_t j = 0; j < of_weights.size(); ++j) result.at(tables_.size() + j) = std::move(of_weights[j]);
  return result;
}

bool is_recorded(at::TensorList tables, at::TensorList weights) {
  if (!at::GradMode::is_enabled() || !(any_requires_grad(tables) || any_requires_grad(weights))) return false;
  if (const auto& transforms = at::functorch::functorchTLSAccessor()) transforms->checkSupportsCppAutogradFunction();
  for (const at::TensorList inputs : {tables, weights}) {
    TORCH_CHECK_NOT_IMPLEMENTED(!autograd::isFwGradDefinedTensorList(inputs),
                                "lookup_sparse has no forward-mode derivative");
  }
  return true;
}

}  // namespace sok_torch
