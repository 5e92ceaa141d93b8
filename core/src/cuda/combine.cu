// SPDX-License-Identifier: Apache-2.0
#include "cuda/pool.h"
#include "cuda/report.cuh"
#include "cuda/stages.h"

namespace sok::cuda {

void combine(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
             const int64_t* inverse, const Floats& rows, int64_t num_elements) {
  const Scope scope(context);
  const Report report(scope);
  std::vector<PoolItem> items;
  items.reserve(lookups.size());
  uint8_t multiple = 8;
  for (const Table& table : tables) multiple = std::min(multiple, multiple_of(table.dimension));
  for (const Lookup& lookup : lookups) {
    const Table& table = tables[static_cast<size_t>(lookup.table)];
    PoolItem item = {};
    item.rows = rows.data;
    item.dtype = static_cast<uint8_t>(rows.dtype);
    item.multiple = multiple;
    item.index = inverse + lookup.first_entry;
    item.index_64bit = true;
    item.row_splits = lookup.row_splits;
    item.weights = lookup.weights;
    item.output = lookup.output.data;
    item.output_stride = lookup.output.stride;
    item.limit = std::max<int64_t>(0, num_elements - table.dimension + 1);
    item.num_entries = static_cast<uint32_t>(lookup.keys.size);
    item.num_bags = static_cast<uint32_t>(lookup.num_bags);
    item.dimension = static_cast<uint32_t>(table.dimension);
    item.stride = 1;
    item.table = table.number;
    item.combiner = static_cast<uint8_t>(lookup.combiner);
    items.push_back(item);
  }
  pool(scope, items, Fault::kOffset, report.errors());
  report.finish(tables);
}

}  // namespace sok::cuda
