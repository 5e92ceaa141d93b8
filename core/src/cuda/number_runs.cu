// SPDX-License-Identifier: Apache-2.0
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <cub/device/device_scan.cuh>

#include "common/memory.h"
#include "cuda/check.h"
#include "cuda/sort.h"

namespace sok::cuda {
namespace {

template <typename Key>
struct Changes {
  const Key* keys;
  __device__ uint32_t operator()(int i) const { return i > 0 && !(keys[i] == keys[i - 1]) ? 1u : 0u; }
};

}  // namespace

template <typename Key>
void number_runs(const Scope& scope, const Key* keys, uint32_t* numbers, int64_t size) {
  if (size == 0) return;
  const auto changes = thrust::make_transform_iterator(thrust::make_counting_iterator(0), Changes<Key>{keys});
  const int count = static_cast<int>(size);
  size_t bytes = 0;
  SOK_CUDA_CHECK(cub::DeviceScan::InclusiveSum(nullptr, bytes, changes, numbers, count, scope.stream()));
  const Buffer<char> memory(scope.context(), static_cast<int64_t>(bytes));
  SOK_CUDA_CHECK(cub::DeviceScan::InclusiveSum(memory.data(), bytes, changes, numbers, count, scope.stream()));
}

template void number_runs(const Scope&, const uint32_t*, uint32_t*, int64_t);
template void number_runs(const Scope&, const uint64_t*, uint32_t*, int64_t);
template void number_runs(const Scope&, const GroupedKey*, uint32_t*, int64_t);

}  // namespace sok::cuda
