// SPDX-License-Identifier: Apache-2.0
// Where the keys of a table live: arithmetic only, the same on every backend.
#ifndef SOK_TABLE_PLACEMENT_H_
#define SOK_TABLE_PLACEMENT_H_

#include <cstdint>

namespace sok {

struct Placement {
  int32_t owner = -1;  // -1: key k belongs to rank k mod num_ranks; else to `owner`
  int32_t num_ranks = 1;
  int32_t rank = 0;
  int64_t num_rows = 0;  // static tables only

  bool contains(int64_t key) const { return static_cast<uint64_t>(key) < static_cast<uint64_t>(num_rows); }

  int32_t owner_of(int64_t key) const {
    if (owner >= 0) return owner;
    const int64_t remainder = key % num_ranks;
    return static_cast<int32_t>(remainder < 0 ? remainder + num_ranks : remainder);
  }

  // Of a key of a static table, on the rank that owns it.
  int64_t slot_of(int64_t key) const { return owner >= 0 ? key : key / num_ranks; }

  // Rows of a static table that `on_rank` holds.
  int64_t local_rows(int32_t on_rank) const {
    if (owner >= 0) return owner == on_rank ? num_rows : 0;
    return num_rows / num_ranks + (on_rank < num_rows % num_ranks ? 1 : 0);
  }
};

}  // namespace sok

#endif  // SOK_TABLE_PLACEMENT_H_
