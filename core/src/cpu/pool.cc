// SPDX-License-Identifier: Apache-2.0
// combine and gather_combine: rows -> one vector a bag, in one pass.
#include "cpu/pool.h"

#include "cpu/contents.h"
#include "cpu/stages.h"

namespace sok::cpu {

Chunks chunk_bags(const sok_context& context, const std::vector<Lookup>& lookups) {
  const auto bytes_per_bag = [](const Lookup& lookup) {
    const int64_t entries = lookup.num_bags == 0 ? 0 : ceil_div(lookup.keys.size, lookup.num_bags);
    return 4 * lookup.id.dimension * (entries + 1);
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

IndexedRows checked_rows(const Lookup& lookup, const RowSource& source, int64_t begin, int64_t end) {
  check_numbers(lookup.id, source.fault, source.numbers, source.limit, begin, end);
  return {source.rows.data, source.rows.dtype, source.stride, source.numbers.data, source.numbers.is_64bit};
}

void check_split_ends(const Lookup& lookup) {
  check_split_ends(lookup.row_splits, lookup.num_bags, lookup.keys.size,
                   {"lookups", lookup.number, "row_splits", lookup.id.name});
}

void check_splits(const Lookup& lookup, int64_t begin, int64_t end) {
  check_splits(lookup.row_splits, begin, end, lookup.keys.size,
               {"lookups", lookup.number, "row_splits", lookup.id.name});
}

void pool(const sok_context& context, const std::vector<Lookup>& lookups, const std::vector<RowSource>& sources) {
  for (const Lookup& lookup : lookups) check_split_ends(lookup);
  const Chunks chunks = chunk_bags(context, lookups);
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range bags = chunks[task];
    const Lookup& lookup = lookups[static_cast<size_t>(bags.item)];
    check_splits(lookup, bags.begin, bags.end);
    PoolTask pool = {checked_rows(lookup, sources[static_cast<size_t>(bags.item)], first_of(lookup, bags.begin),
                                  first_of(lookup, bags.end)),
                     lookup.row_splits,
                     lookup.weights,
                     nullptr,
                     lookup.output.stride,
                     lookup.id.dimension,
                     lookup.combiner};
    for_members(lookup.output, bags.begin, bags.end, [&](int64_t begin, int64_t end, float* output) {
      pool.output = output;
      kernels().pool(pool, begin, end);
    });
  });
}

}  // namespace sok::cpu
