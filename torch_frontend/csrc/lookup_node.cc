// SPDX-License-Identifier: Apache-2.0
#include "lookup_node.h"

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

#include "table_gradient.h"

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

// Whether the running backward() adds to the .grad of every leaf that it comes to.
bool accumulates() {
  const auto* wanted = autograd::get_current_graph_task_exec_info();
  return wanted != nullptr && wanted->empty();
}

// Whether nobody waits for the gradient on its way to this node's .grad.
bool is_plain_leaf(autograd::Node* node) {
  auto* const leaf = dynamic_cast<autograd::AccumulateGrad*>(node);
  return leaf != nullptr && leaf->tensor_pre_hooks().empty() && leaf->tensor_post_acc_grad_hooks() == nullptr &&
         leaf->pre_hooks().empty() && leaf->post_hooks().empty();
}

// The op `carry`, of ../gradient.py.
std::vector<at::Tensor> carry(const c10::List<c10::intrusive_ptr<TableGradient>>& gradients, at::TensorList tables,
                              const Names& names) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("sok::carry", "")
                             .typed<std::vector<at::Tensor>(const c10::List<c10::intrusive_ptr<TableGradient>>&,
                                                            at::TensorList, const Names&)>();
  return op.call(gradients, tables, names);
}

class LookupNode final : public autograd::Node {
 public:
  LookupNode(c10::intrusive_ptr<TableList> list, at::TensorList tables, at::TensorList weights,
             std::unique_ptr<RecordedLookup> lookup)
      : list_(std::move(list)), lookup_(std::move(lookup)) {
    set_next_edges(autograd::collect_next_edges(tables, weights));
  }

  std::string name() const override { return lookup_->name(); }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, name(),
                                ": compiled autograd takes lookups that are in a graph: compile the model too, with "
                                "fullgraph=True, and leave out hooks of its tables (docs/PYTORCH.md)");
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    lookup_->release();
    released_ = true;
  }

 private:
  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const at::Tensor& gradient : gradients) refuse_second_order(gradient);
    TORCH_CHECK(!released_, autograd::ERR_BACKWARD_TWICE);
    const at::NoGradGuard no_grad;
    const size_t num_tables = list_->size();
    auto [of_tables, of_weights] =
        lookup_->backward(std::move(gradients), leads_to(0, num_tables), leads_to(num_tables, num_outputs()));
    variable_list result(num_outputs());
    if (of_tables.defined()) leave(of_tables, &result);
    for (size_t j = 0; j < of_weights.size(); ++j) result.at(num_tables + j) = std::move(of_weights[j]);
    return without_idle_visits(std::move(result));
  }

  bool leads_to(size_t first, size_t end) const {
    for (size_t i = first; i < end; ++i) {
      if (task_should_compute_output(i)) return true;
    }
    return false;
  }

  // Autograd visits a leaf that gets nothing from this node too, which takes it 2.4 us, for 100 tables a quarter of a
  // step. Where the visit would do nothing this node has no edge to the leaf until the running backward() is over.
  variable_list without_idle_visits(variable_list&& gradients) {
    if (!accumulates() || !post_hooks().empty() || autograd::get_current_graph_task_keep_graph()) return gradients;
    variable_list wanted;
    autograd::edge_list to_wanted;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const autograd::Edge& edge = next_edge(i);
      // A leaf that is this edge's alone is where no other node of any graph leads.
      if (!gradients[i].defined() && edge.is_valid() && edge.function.use_count() == 1 &&
          is_plain_leaf(edge.function.get())) {
        continue;
      }
      wanted.push_back(std::move(gradients[i]));
      to_wanted.push_back(edge);
    }
    autograd::edge_list all = std::exchange(next_edges_, std::move(to_wanted));
    autograd::Engine::get_default_engine().queue_callback([self = getptr(), this, all = std::move(all)]() mutable {
      const std::lock_guard<std::mutex> lock(mutex_);
      next_edges_ = std::move(all);
    });
    return wanted;
  }

  // Gives the tables their gradients.
  void leave(const c10::intrusive_ptr<CallGradient>& call, variable_list* result) {
    const bool to_all_leaves = accumulates();
    std::vector<size_t> left, carried;
    left.reserve(list_->size());
    for (size_t i = 0; i < list_->size(); ++i) {
      if (!call->reaches(i) || !task_should_compute_output(i)) continue;
      (to_all_leaves && is_plain_leaf(next_edge(i).function.get()) ? left : carried).push_back(i);
    }
    TableGradient::leave(list_->gradients(), left, call, lookup_->scale());
    if (carried.empty()) return;
    c10::List<c10::intrusive_ptr<TableGradient>> gradients;
    std::vector<at::Tensor> tables;
    Names names;
    for (const size_t i : carried) {
      gradients.push_back(TableGradient::of_entries({{call, i, lookup_->scale()}}));
      tables.push_back(list_->weak().lock(i));
      names.push_back(list_->names().get(i));
    }
    std::vector<at::Tensor> made = carry(gradients, tables, names);
    for (size_t j = 0; j < carried.size(); ++j) (*result)[carried[j]] = std::move(made.at(j));
  }

  c10::intrusive_ptr<TableList> list_;
  std::unique_ptr<RecordedLookup> lookup_;
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

}  // namespace

bool is_recorded(at::TensorList tables, at::TensorList weights) {
  if (!at::GradMode::is_enabled() || !(any_requires_grad(tables) || any_requires_grad(weights))) return false;
  if (const auto& transforms = at::functorch::functorchTLSAccessor()) transforms->checkSupportsCppAutogradFunction();
  for (const at::TensorList inputs : {tables, weights}) {
    TORCH_CHECK_NOT_IMPLEMENTED(!autograd::isFwGradDefinedTensorList(inputs),
                                "lookup_sparse has no forward-mode derivative");
  }
  return true;
}

void record(std::vector<at::Tensor>* outputs, c10::intrusive_ptr<TableList> list, at::TensorList tables,
            at::TensorList weights, std::unique_ptr<RecordedLookup> lookup) {
  autograd::set_history(*outputs, make_node<LookupNode>(std::move(list), tables, weights, std::move(lookup)));
}

void follow_shape(const at::Tensor& tensor) {
  const auto accumulator = autograd::impl::try_get_grad_accumulator(tensor);
  if (!accumulator) return;
  accumulator->clear_input_metadata();
  accumulator->add_input_metadata(tensor);
}

void check_unchanged(const Borrowed& kept) {
  TORCH_CHECK(
      kept.unchanged(),
      "one of the variables needed for gradient computation has been modified by an inplace operation: ids, row "
      "splits or weights of a lookup, or rows that the gradient of its weights needs");
}

}  // namespace sok_torch
