// SPDX-License-Identifier: Apache-2.0
// Tensors of an optimizer's state, known from one step to the next (../table_states.py).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <optional>
#include <vector>

#include "weak_tensors.h"

namespace sok_torch {

// torch.classes.sok.TensorList. It does not keep them alive: who calls it holds them, in the optimizer.
class TensorList final : public torch::CustomClassHolder {
 public:
  // num_states: how many `tensors` there are of each table, one state of all tables after the other. They are kept
  // table by table.
  TensorList(std::vector<at::Tensor> tensors, int64_t num_states);

  // As the ops of these names. No number when one is gone.
  std::optional<double> common_number() const;
  void count_up() const;

  const WeakTensors& tensors() const { return tensors_; }

 private:
  WeakTensors tensors_;
};

}  // namespace sok_torch
