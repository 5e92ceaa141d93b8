// SPDX-License-Identifier: Apache-2.0
#include "common/bag_parts.h"

#include "common/status.h"

namespace sok {

void BagParts::add(const Table& table, int32_t rank, int32_t lookup, int64_t num_bags) {
  int64_t elements = 0;
  parts_.push_back({rank, lookup, num_bags, num_splits_, num_elements_});
  SOK_CHECK(!__builtin_add_overflow(num_splits_, num_bags + 1, &num_splits_) &&
                !__builtin_mul_overflow(num_bags, table.dimension, &elements) &&
                !__builtin_add_overflow(num_elements_, elements, &num_elements_),
            "table '", table.name, "': ", num_bags, " bags for each rank do not fit the address space");
}

BagParts::BagParts(const std::vector<Table>& tables, const std::vector<Lookup>& lookups, int32_t num_ranks) {
  int64_t bags = 0;
  for (const Lookup& lookup : lookups) {
    first_bags_.push_back(bags);
    bags += lookup.num_bags;
  }
  first_bags_.push_back(bags);
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    for (size_t i = 0; i < lookups.size(); ++i) {
      const Table& table = tables[static_cast<size_t>(lookups[i].table)];
      if (lives_on(table, rank)) add(table, rank, static_cast<int32_t>(i), lookups[i].num_bags);
    }
  }
}

BagParts received_bag_parts(const std::vector<Table>& tables, const std::vector<int32_t>& lookup_tables,
                            int32_t this_rank, int32_t num_sources, const int64_t* bag_counts) {
  BagParts result;
  for (int32_t source = 0; source < num_sources; ++source) {
    for (size_t i = 0; i < lookup_tables.size(); ++i) {
      const Table& table = tables[static_cast<size_t>(lookup_tables[i])];
      const int64_t bags = bag_counts[static_cast<size_t>(source) * lookup_tables.size() + i];
      SOK_CHECK(bags >= 0 && bags <= kMaxEntries, "table '", table.name, "': bag_counts[", source, "][", i, "] is ",
                bags, ", must be in [0, 2^31)");
      if (lives_on(table, this_rank)) result.add(table, source, static_cast<int32_t>(i), bags);
    }
  }
  return result;
}

}  // namespace sok
