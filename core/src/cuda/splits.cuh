// SPDX-License-Identifier: Apache-2.0
// Row splits, read and checked by a block.
#ifndef SOK_CUDA_SPLITS_CUH_
#define SOK_CUDA_SPLITS_CUH_

#include "cuda/launch.h"
#include "cuda/report.cuh"

namespace sok::cuda {

// Whether the split of a bag is one of 0 = s[0] <= s[1] <= ... = num_entries, and not above the next.
__device__ __forceinline__ bool is_split(const int64_t* splits, int64_t bag, int64_t num_bags, int64_t num_entries) {
  const int64_t split = splits[bag];
  return split >= 0 && split <= num_entries && (bag > 0 || split == 0) &&
         (bag < num_bags ? split <= splits[bag + 1] : split == num_entries);
}

// Copies the splits of bags [first, first + count] (nullptr: 0, 1, 2, ...) to `ends`, in shared memory. False, in the
// whole block, when they are not 0 = s[0] <= s[1] <= ... = num_entries; `ends` is of no use then. Every thread must
// call it.
template <typename Split>
__device__ __forceinline__ bool load_splits(const Split* splits, uint32_t num_bags, uint32_t num_entries,
                                            uint32_t first, uint32_t count, int32_t table, uint32_t* ends,
                                            sok_error_record* errors) {
  uint32_t wrong = UINT32_MAX;
  for (uint32_t t = threadIdx.x; t <= count; t += kThreads) {
    const uint32_t bag = first + t;
    const int64_t end = splits == nullptr ? bag : static_cast<int64_t>(splits[bag]);
    const bool fits = end >= 0 && end <= num_entries && (bag > 0 || end == 0) && (bag < num_bags || end == num_entries);
    ends[t] = fits ? static_cast<uint32_t>(end) : 0;
    if (!fits) wrong = bag;
  }
  __syncthreads();
  for (uint32_t t = threadIdx.x; t < count; t += kThreads) {
    if (ends[t] > ends[t + 1]) wrong = first + t;
  }
  if (wrong != UINT32_MAX) report(errors, Fault::kRowSplits, table, wrong, num_entries);
  return __syncthreads_and(wrong == UINT32_MAX) != 0;
}

}  // namespace sok::cuda

#endif  // SOK_CUDA_SPLITS_CUH_
