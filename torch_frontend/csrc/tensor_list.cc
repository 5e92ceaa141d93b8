// SPDX-License-Identifier: Apache-2.0
#include "tensor_list.h"

#include <c10/util/Exception.h>

#include "ops.h"

namespace sok_torch {
namespace {

std::vector<at::Tensor> by_table(const std::vector<at::Tensor>& by_state, int64_t num_states) {
  const auto n = static_cast<int64_t>(by_state.size());
  TORCH_CHECK_VALUE(num_states > 0 && n % num_states == 0, n, " tensors for ", num_states, " states a table");
  std::vector<at::Tensor> result;
  result.reserve(by_state.size());
  for (int64_t i = 0; i < n; ++i) result.push_back(by_state[i % num_states * (n / num_states) + i / num_states]);
  return result;
}

}  // namespace

TensorList::TensorList(std::vector<at::Tensor> tensors, int64_t num_states) : tensors_(by_table(tensors, num_states)) {}

std::optional<double> TensorList::common_number() const {
  return sok_torch::common_number(BorrowedTensors(tensors_).get());
}

void TensorList::count_up() const {
  TORCH_CHECK(tensors_.present(), "a step count of the optimizer is gone");
  sok_torch::count_up(BorrowedTensors(tensors_).get());
}

}  // namespace sok_torch
