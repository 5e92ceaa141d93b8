// SPDX-License-Identifier: Apache-2.0
// Ranks among numbers of which some are counted, for .cu files.
#ifndef SOK_CUDA_NUMBER_H_
#define SOK_CUDA_NUMBER_H_

#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <cstdint>
#include <cub/device/device_scan.cuh>

#include "common/memory.h"
#include "cuda/check.h"
#include "cuda/context.h"

namespace sok::cuda {

// ranks[i] for i in [0, n]: of how many numbers j below i counted(j) is 1; it is asked for n too.
template <typename Counted>
void number(const Scope& scope, const Counted& counted, int64_t n, uint32_t* ranks) {
  const auto input = thrust::make_transform_iterator(thrust::make_counting_iterator(0u), counted);
  const int64_t count = n + 1;
  size_t bytes = 0;
  SOK_CUDA_CHECK(cub::DeviceScan::ExclusiveSum(nullptr, bytes, input, ranks, count, scope.stream()));
  const Buffer<char> memory(scope.context(), static_cast<int64_t>(bytes));
  SOK_CUDA_CHECK(cub::DeviceScan::ExclusiveSum(memory.data(), bytes, input, ranks, count, scope.stream()));
}

}  // namespace sok::cuda

#endif  // SOK_CUDA_NUMBER_H_
