// SPDX-License-Identifier: Apache-2.0
// sok/messages.h over tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "sok/messages.h"

namespace sok_torch {

// The messages of one direction, between this rank and all.
struct Messages {
  // counts: [ranks, columns] int64 on the CPU, as they were swapped. dimensions: of each table; positions: of the table
  // of each lookup; both must outlive it. Throws ValueError for numbers that cannot be.
  Messages(at::Tensor counts, const std::vector<int64_t>& dimensions, const std::vector<int64_t>& positions);

  at::Tensor counts;
  std::vector<int64_t> keys, floats;  // elements of the message of each rank
  sok_messages view;
};

}  // namespace sok_torch
