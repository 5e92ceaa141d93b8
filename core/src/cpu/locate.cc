// SPDX-License-Identifier: Apache-2.0
// locate: key -> slot on the owner.
#include <algorithm>

#include "cpu/contents.h"
#include "cpu/stages.h"
#include "table/index.h"

namespace sok::cpu {
namespace {

void check_row_splits(const sok_context& context, const std::vector<Lookup>& lookups) {
  constexpr int64_t kBagsPerTask = 1 << 16;
  Chunks chunks;
  for (const Lookup& lookup : lookups) chunks.add(lookup.row_splits != nullptr ? lookup.num_bags + 1 : 0, kBagsPerTask);
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    const Lookup& lookup = lookups[static_cast<size_t>(range.item)];
    const Label label{"lookups", lookup.number, "row_splits", lookup.id.name};
    if (range.begin == 0) check_split_ends(lookup.row_splits, lookup.num_bags, lookup.keys.size, label);
    check_splits(lookup.row_splits, range.begin, std::min(range.end, lookup.num_bags), lookup.keys.size, label);
  });
}

}  // namespace

void locate(const sok_context& context, const std::vector<Table>& tables, const std::vector<const sok_index*>& indices,
            const std::vector<Lookup>& lookups, uint32_t flags) {
  constexpr int64_t kKeyBytes = 32;
  const int64_t bytes = task_bytes(context, kKeyBytes * count_entries(lookups));
  Chunks chunks;
  for (const Lookup& lookup : lookups) chunks.add(lookup.keys.size, items_per_task(bytes, kKeyBytes));
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    const Lookup& lookup = lookups[static_cast<size_t>(range.item)];
    const Table& table = tables[static_cast<size_t>(lookup.table)];
    const Placement placement = table.placement;
    check_keys(table, lookup.keys, range.begin, range.end);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t key = integer_at(lookup.keys, i);
      const Home home = placement.home_of(key);
      if (home.rank != placement.rank) throw_found({Fault::kForeignKey, table.number, key, home.rank}, table.name);
      lookup.slots[i] = home.slot;
    }
  });
  if (any_index(indices)) check_row_splits(context, lookups);
  ask_indices(context, indices, lookups, flags);
}

}  // namespace sok::cpu
