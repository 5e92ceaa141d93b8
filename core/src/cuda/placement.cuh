// SPDX-License-Identifier: Apache-2.0
// Where keys live, on the device.
#ifndef SOK_CUDA_PLACEMENT_CUH_
#define SOK_CUDA_PLACEMENT_CUH_

#include "cuda/report.cuh"
#include "table/placement.h"

namespace sok::cuda {

struct DevicePlacement {
  int64_t num_rows;
  int32_t owner;  // -1: key mod num_ranks
  int32_t num_ranks;
  int32_t rank;
  int32_t table;  // position in the call

  static DevicePlacement of(const Placement& p, int32_t table) {
    return {p.num_rows, p.owner, p.num_ranks, p.rank, table};
  }

  // False, and a report, for a key outside the table.
  __device__ bool contains(int64_t key, sok_error_record* errors) const {
    if (static_cast<uint64_t>(key) < static_cast<uint64_t>(num_rows)) return true;
    report(errors, Fault::kKey, table, key, num_rows);
    return false;
  }
  // Of a key that the table contains.
  __device__ int64_t slot_of(int64_t key) const { return owner >= 0 || num_ranks == 1 ? key : key / num_ranks; }
  __device__ int32_t owner_of(int64_t key) const {
    return owner >= 0 ? owner : static_cast<int32_t>(key - slot_of(key) * num_ranks);
  }
  // The slot on this rank, or -1 and a report.
  __device__ int64_t local_slot(int64_t key, sok_error_record* errors) const {
    if (!contains(key, errors)) return -1;
    const int32_t where = num_ranks == 1 ? 0 : owner_of(key);
    if (where == rank) return slot_of(key);
    report(errors, Fault::kForeignKey, table, key, where);
    return -1;
  }
};

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
