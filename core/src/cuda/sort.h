// SPDX-License-Identifier: Apache-2.0
// Sorting and numbering of keys on the device, by CUB.
#ifndef SOK_CUDA_SORT_H_
#define SOK_CUDA_SORT_H_

#include <cstdint>

#include "common/host_device.h"
#include "cuda/context.h"

namespace sok::cuda {

// Two arrays of each: the input lies in keys[0] and values[0], the output in keys[1] and values[1] after sort_pairs.
template <typename Key>
struct Pairs {
  Key* keys[2];
  uint32_t* values[2];
};

// Sorts by the low `bits` of the keys; pairs of equal keys keep their order. All four arrays hold `size` elements (<
// 2^31) and are overwritten.
template <typename Key>
void sort_pairs(const Scope& scope, Pairs<Key>& pairs, int64_t size, int bits);

// A key of a group: what is sorted by more than 64 bits, in two steps.
struct GroupedKey {
  int64_t key;
  uint32_t group;

  SOK_HOST_DEVICE bool operator==(const GroupedKey& other) const { return key == other.key && group == other.group; }
};

// numbers[i]: how many times the key has changed up to position i.
template <typename Key>
void number_runs(const Scope& scope, const Key* keys, uint32_t* numbers, int64_t size);

}  // namespace sok::cuda

#endif  // SOK_CUDA_SORT_H_
