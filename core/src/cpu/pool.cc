// SPDX-License-Identifier: Apache-2.0
#include "cpu/pool.h"

namespace sok::cpu {

Chunks chunk_bags(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups) {
  const auto bytes_per_bag = [&](const Lookup& lookup) {
    const int64_t entries = lookup.num_bags == 0 ? 0 : ceil_div(lookup.keys.size, lookup.num_bags);
    return 4 * tables[static_cast<size_t>(lookup.table)].dimension * (entries + 1);
  };
  int64_t total = 0;
  for (const Lookup& lookup : lookups) {
    if (__builtin_add_overflow(total, bytes_per_bag(lookup) * lookup.num_bags, &total)) total = INT64_MAX;
  }
  const int64_t bytes = task_bytes(context, total);
  Chunks chunks;
  for (const Lookup& lookup : lookups) chunks.add(lookup.num_bags, items_per_task(bytes, bytes_per_bag(lookup)));
  return chunks;
}

void ExchangedRows::check(size_t i, int64_t begin, int64_t end) const {
  const Table& table = tables_[static_cast<size_t>(lookups_[i].table)];
  const int64_t* const offsets = inverse_ + lookups_[i].first_entry;
  const int64_t limit = num_elements_ - table.dimension + 1;
  const int64_t bad =
      kernels().find_outside(offsets, true, begin, end, static_cast<uint64_t>(std::max<int64_t>(0, limit)));
  SOK_CHECK_STATUS(SOK_OUT_OF_RANGE, bad < 0, "table '", table.name, "': inverse names a row at element ", offsets[bad],
                   ", outside the ", num_elements_, " elements of rows");
}

}  // namespace sok::cpu
