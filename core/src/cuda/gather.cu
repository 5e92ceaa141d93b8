// SPDX-License-Identifier: Apache-2.0
#include "cuda/pool.h"
#include "cuda/report.cuh"
#include "cuda/stages.h"

namespace sok::cuda {

void gather(const sok_context& context, const std::vector<Table>& tables, int32_t num_sources, const int64_t* counts,
            const int64_t* /*keys*/, const int64_t* slots, float* rows) {
  const Scope scope(context);
  const Report report(scope);
  std::vector<PoolItem> items;
  items.reserve(static_cast<size_t>(num_sources) * tables.size());
  for (int32_t source = 0; source < num_sources; ++source) {
    for (size_t t = 0; t < tables.size(); ++t) {
      const Table& table = tables[t];
      const int64_t count = *counts++;
      SOK_CHECK(count <= kMaxEntries, "table '", table.name, "': ", count, " rows at once, more than 2^31 - 1");
      PoolItem item = {};
      item.rows = table.weight;
      item.index = slots;
      item.index_64bit = true;
      item.output = rows;
      item.limit = table.num_slots;
      item.num_entries = item.num_bags = static_cast<uint32_t>(count);
      item.dimension = item.stride = static_cast<uint32_t>(table.dimension);
      item.table = table.number;
      item.combiner = SOK_SUM;
      items.push_back(item);
      slots += count;
      rows += count * table.dimension;
    }
  }
  pool(scope, items, Fault::kSlot, report.record());
  report.finish(tables);
}

}  // namespace sok::cuda
