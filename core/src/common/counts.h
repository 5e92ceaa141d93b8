// SPDX-License-Identifier: Apache-2.0
// The message of a swap of counts: numbers that the host knows, and places of numbers that are on the device.
#ifndef SOK_COMMON_COUNTS_H_
#define SOK_COMMON_COUNTS_H_

#include <cstdint>

#include "common/host_device.h"
#include "sok/communicator.h"

namespace sok {

// The arguments of sok_swap_counts, checked.
struct CountSwap {
  int64_t num_columns = 0;
  const int64_t* known = nullptr;  // NULL: 0 everywhere
  int32_t num_parts = 0;
  const sok_count_columns* parts = nullptr;
};

// The parts' counts, as a kernel takes them.
struct CountParts {
  const int64_t* counts[SOK_MAX_COUNT_PARTS] = {};
};

// A cell of a plan: a count, which is never negative, or where one is.
SOK_HOST_DEVICE inline int64_t count_cell(int64_t part, int64_t index) { return ~(index * SOK_MAX_COUNT_PARTS + part); }

SOK_HOST_DEVICE inline int64_t count_at(int64_t cell, const CountParts& parts) {
  return cell >= 0 ? cell : parts.counts[~cell % SOK_MAX_COUNT_PARTS][~cell / SOK_MAX_COUNT_PARTS];
}

// Fills plan [num_ranks, n] for columns [first, first + n) of the message.
inline CountParts plan_counts(const CountSwap& swap, int32_t num_ranks, int64_t first, int64_t n, int64_t* plan) {
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    for (int64_t i = 0; i < n; ++i) {
      plan[rank * n + i] = swap.known != nullptr ? swap.known[rank * swap.num_columns + first + i] : 0;
    }
  }
  CountParts result;
  for (int32_t part = 0; part < swap.num_parts; ++part) {
    const sok_count_columns& given = swap.parts[part];
    const int64_t k = given.counts.shape[1];
    result.counts[part] = static_cast<const int64_t*>(given.counts.data);
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      for (int64_t i = 0; i < k; ++i) {
        const int64_t column = (given.columns != nullptr ? given.columns[i] : i) - first;
        if (column >= 0 && column < n) plan[rank * n + column] = count_cell(part, rank * k + i);
      }
    }
  }
  return result;
}

}  // namespace sok

#endif  // SOK_COMMON_COUNTS_H_
