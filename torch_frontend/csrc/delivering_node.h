// SPDX-License-Identifier: Apache-2.0
// What the functions of autograd of a lookup have in common, on one rank and on several: their inputs are the tables of
// the call, then the weights, and the tables get their gradients in one piece (../delivery.py).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace sok_torch {

class DeliveringNode : public torch::autograd::Node {
 public:
  void release_variables() final;

 protected:
  // Where the gradients of a call go. Of delivered and carried, positions of tables, the first are left with the tables
  // and those of the second returned for autograd.
  using Leave = c10::function_ref<std::vector<at::Tensor>(at::IntArrayRef delivered, at::IntArrayRef carried)>;

  DeliveringNode(std::vector<at::Tensor> tables, at::TensorList weights);

  // What a node does, with `mutex_` held: gradients of the outputs, of the first order, undefined where nobody used the
  // output -> those of the inputs. It is not called again after `release`.
  virtual torch::autograd::variable_list differentiate(torch::autograd::variable_list&& gradients) = 0;

  // Frees what was saved for `differentiate`, with `mutex_` held.
  virtual void release() = 0;

  // Whether the running backward() leads to one of the tables, or of the weights.
  bool leads_to_tables() const { return leads_to(0, tables_.size()); }
  bool leads_to_weights() const { return leads_to(tables_.size(), num_outputs()); }

  // Gives the tables for which `reaches` is true their gradients. -> what `differentiate` returns, where of_weights are
  // the gradients of the weights, if they are wanted; nothing where autograd need not visit the tables' leaves.
  torch::autograd::variable_list deliver(c10::function_ref<bool(size_t)> reaches, Leave leave,
                                         std::vector<at::Tensor> of_weights);

  const std::vector<at::Tensor>& tables() const { return tables_; }

 private:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) final;
  bool leads_to(size_t first, size_t end) const;

  std::vector<at::Tensor> tables_;
  torch::autograd::edge_list unvisited_;
  bool released_ = false;
};

// Whether a function of autograd is to record a call. Throws where that would have to be forward-mode or functorch's.
bool is_recorded(at::TensorList tables, at::TensorList weights);

// Nodes are held by intrusive_ptr since PyTorch 2.10 or so, before by shared_ptr.
template <typename Node, typename... Arguments>
auto make_node(Arguments&&... arguments) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
  } else {
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  }
}

}  // namespace sok_torch
