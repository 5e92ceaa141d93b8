// SPDX-License-Identifier: Apache-2.0
// Where the keys of a table live: arithmetic only, the same on every backend.
#ifndef SOK_TABLE_PLACEMENT_H_
#define SOK_TABLE_PLACEMENT_H_

#include <cstdint>

#include "common/host_device.h"

namespace sok {

// Where a key is: its rank, and the slot that it has there where no index says otherwise.
struct Home {
  int32_t rank;
  int64_t slot;
};

struct Placement {
  static constexpr int64_t kAnyKey = 0;  // as num_rows

  int32_t owner = -1;  // -1: key k belongs to rank k mod num_ranks; else to `owner`
  int32_t num_ranks = 1;
  int32_t rank = 0;
  int64_t num_rows = 0;  // keys are below it

  SOK_HOST_DEVICE bool contains(int64_t key) const {
    return static_cast<uint64_t>(key) <= static_cast<uint64_t>(num_rows) - 1;
  }

  // Of any key, with one division: the slot is rounded down, so that the remainder, which is the rank, is not negative.
  SOK_HOST_DEVICE Home home_of(int64_t key) const {
    if (owner >= 0) return {owner, key};
    if (num_ranks == 1) return {0, key};
    int64_t slot = key / num_ranks;
    int64_t remainder = key - slot * num_ranks;
    if (remainder < 0) remainder += num_ranks, --slot;
    return {static_cast<int32_t>(remainder), slot};
  }

  // The key that is at home there.
  SOK_HOST_DEVICE int64_t key_of(Home home) const { return owner >= 0 ? home.slot : home.slot * num_ranks + home.rank; }

  SOK_HOST_DEVICE bool lives_on(int32_t on_rank) const { return owner < 0 || owner == on_rank; }

  // How many of the keys [0, num_rows) `on_rank` holds; rank 0 has the most of a distributed table.
  SOK_HOST_DEVICE int64_t local_rows(int32_t on_rank) const {
    if (owner >= 0) return owner == on_rank ? num_rows : 0;
    return num_rows / num_ranks + (on_rank < num_rows % num_ranks ? 1 : 0);
  }
};

}  // namespace sok

#endif  // SOK_TABLE_PLACEMENT_H_
