// SPDX-License-Identifier: Apache-2.0
#include "cuda/sort.h"

#include <cub/device/device_radix_sort.cuh>

#include "common/memory.h"
#include "cuda/check.h"

namespace sok::cuda {

template <typename Key>
void sort_pairs(const Scope& scope, Pairs<Key>& pairs, int64_t size, int bits) {
  if (size == 0) return;
  cub::DoubleBuffer<Key> keys(pairs.keys[0], pairs.keys[1]);
  cub::DoubleBuffer<uint32_t> values(pairs.values[0], pairs.values[1]);
  const int count = static_cast<int>(size);
  size_t bytes = 0;
  SOK_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, values, count, 0, bits, scope.stream()));
  const Buffer<char> memory(scope.context(), static_cast<int64_t>(bytes));
  SOK_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(memory.data(), bytes, keys, values, count, 0, bits, scope.stream()));
  pairs = {{keys.Alternate(), keys.Current()}, {values.Alternate(), values.Current()}};
}

template void sort_pairs(const Scope&, Pairs<uint32_t>&, int64_t, int);
template void sort_pairs(const Scope&, Pairs<uint64_t>&, int64_t, int);

}  // namespace sok::cuda
