// SPDX-License-Identifier: Apache-2.0
// A lookup call as a function of autograd, of a process alone and of several: its inputs are the tables of the call,
// then the weights. All of PyTorch's autograd that is no public API is here and in lookup_node.cc; with a version that
// lacks one of these it does not compile:
//   - autograd::Node, make_node        nodes are held by shared_ptr or intrusive_ptr, as PyTorch's version has it. With
//                                      torch::autograd::Function backward() would make a tensor for each table.
//   - get_current_graph_task_exec_info tells a backward() to all leaves, which adds to .grad, from autograd.grad() and
//                                      backward(inputs=...). Without it autograd would have to carry all gradients.
//   - AccumulateGrad                   the node of a leaf, asked for the hooks that wait for its gradient.
//   - get_current_graph_task_keep_graph, Engine::queue_callback, next_edges_, use_count() of a node
//                                      leave out the leaves that get nothing; without them every leaf is visited.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <utility>
#include <vector>

#include "call_gradient.h"
#include "table_list.h"

namespace sok_torch {

// What a call keeps for backward().
class RecordedLookup {
 public:
  struct Gradients {
    c10::intrusive_ptr<CallGradient> of_tables;  // null: none
    std::vector<at::Tensor> of_weights;
  };

  RecordedLookup() = default;
  RecordedLookup(const RecordedLookup&) = delete;
  RecordedLookup& operator=(const RecordedLookup&) = delete;
  virtual ~RecordedLookup() = default;

  virtual const char* name() const = 0;

  // Gradients of the outputs, undefined where nobody used one -> those of the inputs, as far as they are wanted. Throws
  // RuntimeError when something it kept was changed in place.
  virtual Gradients backward(std::vector<at::Tensor> gradients, bool of_tables, bool of_weights) = 0;

  // A factor of the tables' gradients.
  virtual double scale() const { return 1.0; }

  // Frees what was kept: there will be no backward() any more.
  virtual void release() = 0;
};

// Whether a function of autograd is to record a call. Throws where that would have to be forward-mode or functorch's.
bool is_recorded(at::TensorList tables, at::TensorList weights);

// Makes `outputs` those of a function of autograd. Its gradients go to the tables' TableGradients; through autograd go
// those that somebody waits for on the way (hooks) or takes away (autograd.grad()).
void record(std::vector<at::Tensor>* outputs, c10::intrusive_ptr<TableList> list, at::TensorList tables,
            at::TensorList weights, std::unique_ptr<RecordedLookup> lookup);

// Tells autograd of a tensor's new shape: gradients that go to it through autograd are compared with it.
void follow_shape(const at::Tensor& tensor);

// Throws RuntimeError as autograd does where a saved tensor was changed.
void check_unchanged(const Borrowed& kept);

}  // namespace sok_torch
