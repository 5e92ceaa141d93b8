// SPDX-License-Identifier: Apache-2.0
#include "leaves.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <mutex>

namespace sok_torch {
namespace {

namespace autograd = torch::autograd;
using autograd::GraphTask;

// Whether the running backward() adds to the .grad of a leaf. (autograd.grad() does not.)
bool accumulates(autograd::Node* leaf) {
  const auto* nodes = autograd::get_current_graph_task_exec_info();
  if (nodes == nullptr) return false;
  if (nodes->empty()) return true;
  const auto found = nodes->find(leaf);
  return found != nodes->end() && found->second.needed_ && !found->second.captures_;
}

// The task that runs, which autograd does not hand out, by two of its members, which it does; nullptr where that does
// not fit together.
GraphTask* current_task() {
  const auto* nodes = autograd::get_current_graph_task_exec_info();
  if (nodes == nullptr) return nullptr;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  constexpr size_t kOffset = offsetof(GraphTask, exec_info_);
  constexpr size_t kOther = offsetof(GraphTask, nodes_in_graph_);
#pragma GCC diagnostic pop
  const char* task = reinterpret_cast<const char*>(nodes) - kOffset;
  if (static_cast<const void*>(task + kOther) != autograd::get_current_graph_task_nodes_in_graph()) return nullptr;
  return const_cast<GraphTask*>(reinterpret_cast<const GraphTask*>(task));
}

}  // namespace

bool carried(const at::Tensor& table) {
  if (!table.is_leaf()) return true;
  if (!autograd::impl::hooks(table).empty() || autograd::impl::post_acc_grad_hooks(table) != nullptr) return true;
  const auto leaf = autograd::impl::try_get_grad_accumulator(table);
  return leaf == nullptr || !leaf->pre_hooks().empty() || !leaf->post_hooks().empty() || !accumulates(leaf.get());
}

bool nothing_else_leads_to(const autograd::edge_list& edges) {
  GraphTask* task = current_task();
  if (task == nullptr || !task->exec_info_.empty()) return false;
  const std::lock_guard<std::mutex> lock(task->mutex_);
  for (const autograd::Edge& edge : edges) {
    if (!edge.is_valid()) continue;
    const auto left = task->dependencies_.find(edge.function.get());
    if (left == task->dependencies_.end() || left->second != 1) return false;
    if (task->not_ready_.count(edge.function.get()) != 0) return false;
  }
  return true;
}

}  // namespace sok_torch
