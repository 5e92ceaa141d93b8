// SPDX-License-Identifier: Apache-2.0
#include "common/bag_parts.h"

#include "common/status.h"

namespace sok {

BagParts::BagParts(const std::vector<Table>& tables, const std::vector<Lookup>& lookups, int32_t num_ranks,
                   const std::vector<int64_t>& rows) {
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    num_elements_ += rows.empty() ? 0 : rows[static_cast<size_t>(rank)];
    const int64_t first_sum = num_elements_;
    for (size_t i = 0; i < lookups.size(); ++i) {
      const Table& table = tables[static_cast<size_t>(lookups[i].table)];
      if (!table.placement.lives_on(rank)) continue;
      const int64_t bags_here = lookups[i].num_bags;
      int64_t elements = 0;
      parts_.push_back({rank, static_cast<int32_t>(i), bags_here, num_splits_, num_elements_});
      SOK_CHECK(!__builtin_add_overflow(num_splits_, bags_here + 1, &num_splits_) &&
                    !__builtin_mul_overflow(bags_here, table.dimension, &elements) &&
                    !__builtin_add_overflow(num_elements_, elements, &num_elements_),
                "table '", table.name, "': ", bags_here, " bags for each rank do not fit the address space");
    }
    sums_.push_back(num_elements_ - first_sum);
  }
}

}  // namespace sok
