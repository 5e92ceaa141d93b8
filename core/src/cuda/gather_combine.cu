// SPDX-License-Identifier: Apache-2.0
#include "cuda/pool.h"
#include "cuda/report.cuh"
#include "cuda/stages.h"

namespace sok::cuda {

void gather_combine(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups) {
  const Scope scope(context);
  const Report report(scope);
  std::vector<PoolItem> items;
  items.reserve(lookups.size());
  for (const Lookup& lookup : lookups) {
    const Table& table = tables[static_cast<size_t>(lookup.table)];
    PoolItem item = {};
    item.rows = table.weight.data;
    item.dtype = static_cast<uint8_t>(table.weight.dtype);
    item.multiple = multiple_of(table.dimension);
    item.index = lookup.keys.data;
    item.index_64bit = lookup.keys.is_64bit;
    item.row_splits = lookup.row_splits;
    item.weights = lookup.weights;
    item.output = lookup.output.data;
    item.output_stride = lookup.output.stride;
    item.limit = table.num_slots;
    item.num_entries = static_cast<uint32_t>(lookup.keys.size);
    item.num_bags = static_cast<uint32_t>(lookup.num_bags);
    item.dimension = item.stride = static_cast<uint32_t>(table.dimension);
    item.table = table.number;
    item.combiner = static_cast<uint8_t>(lookup.combiner);
    items.push_back(item);
  }
  pool(scope, items, Fault::kKey, report.errors());
  report.finish(tables);
}

}  // namespace sok::cuda
