// SPDX-License-Identifier: Apache-2.0
#include "common/row_source.h"

#include <algorithm>
#include <numeric>

#include "common/tensor.h"

namespace sok {

std::vector<RowSource> rows_of_tables(const std::vector<Columns>& tables, const std::vector<Lookup>& lookups) {
  std::vector<RowSource> sources;
  sources.reserve(lookups.size());
  for (const Lookup& lookup : lookups) {
    const Columns& table = tables[static_cast<size_t>(lookup.table)];
    sources.push_back({table.weight, lookup.keys, table.dimension, table.dimension, table.num_slots,
                       lookup.located ? Fault::kSlot : Fault::kKey});
  }
  return sources;
}

std::vector<RowSource> check_exchanged_rows(const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
                                            const sok_tensor& inverse, const sok_tensor& floats) {
  const int64_t* const offsets = checked_data<int64_t>(inverse, {"inverse"}, SOK_INT64, {count_entries(lookups)});
  float* const data = checked_data<float>(floats, {"floats"}, SOK_FLOAT32, {kAnySize});
  int64_t multiple = 0;
  for (const Table& table : tables) multiple = std::gcd(multiple, table.dimension);
  std::vector<RowSource> sources;
  sources.reserve(lookups.size());
  for (const Lookup& lookup : lookups) {
    sources.push_back({{data, SOK_FLOAT32},
                       {offsets + lookup.first_entry, lookup.keys.size},
                       1,
                       multiple,
                       std::max<int64_t>(0, floats.shape[0] - lookup.id.dimension + 1),
                       Fault::kOffset});
  }
  return sources;
}

}  // namespace sok
