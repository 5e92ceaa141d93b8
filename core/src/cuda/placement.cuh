// SPDX-License-Identifier: Apache-2.0
// Where keys live, on the device.
#ifndef SOK_CUDA_PLACEMENT_CUH_
#define SOK_CUDA_PLACEMENT_CUH_

#include "cuda/report.cuh"
#include "table/placement.h"

namespace sok::cuda {

// False, and a report, for a key outside the table.
__device__ inline bool contains(const Placement& placement, int32_t table, int64_t key, sok_error_record* errors) {
  if (placement.contains(key)) return true;
  report(errors, Fault::kKey, table, key, placement.num_rows);
  return false;
}

// The last i in [0, count) with first(i) <= value.
template <typename First>
__device__ __forceinline__ uint32_t last_at_or_before(uint32_t count, int64_t value, First first) {
  uint32_t low = 0, high = count - 1;
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (first(middle) <= value) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace sok::cuda

#endif  // SOK_CUDA_PLACEMENT_CUH_
