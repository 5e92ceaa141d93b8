// SPDX-License-Identifier: Apache-2.0
// Running sums by one block.
#ifndef SOK_CUDA_ADD_UP_CUH_
#define SOK_CUDA_ADD_UP_CUH_

#include <cstdint>
#include <cub/block/block_scan.cuh>

#include "cuda/launch.h"

namespace sok::cuda {

// Each sum becomes that of those before it. Returns that of all.
__device__ __forceinline__ uint32_t add_up(uint32_t* sums, int64_t count) {
  constexpr int kItems = 8;
  using Scan = cub::BlockScan<uint32_t, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  uint32_t before = 0;
  for (int64_t first = 0; first < count; first += kThreads * kItems) {
    uint32_t items[kItems], sum;
    const int64_t begin = first + threadIdx.x * kItems;
#pragma unroll
    for (int k = 0; k < kItems; ++k) items[k] = begin + k < count ? sums[begin + k] : 0;
    Scan(storage).ExclusiveSum(items, items, sum);
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (begin + k < count) sums[begin + k] = before + items[k];
    }
    before += sum;
    __syncthreads();
  }
  return before;
}

}  // namespace sok::cuda

#endif  // SOK_CUDA_ADD_UP_CUH_
