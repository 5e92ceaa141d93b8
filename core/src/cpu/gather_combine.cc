// SPDX-License-Identifier: Apache-2.0
// gather_combine: one pass from table rows to pooled vectors.
#include "cpu/pool.h"
#include "cpu/stages.h"

namespace sok::cpu {

void gather_combine(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups) {
  pool_lookups(
      context, tables, lookups,
      [&](size_t i) { return table_rows(tables[static_cast<size_t>(lookups[i].table)], lookups[i]); },
      [&](size_t i, int64_t begin, int64_t end) {
        check_keys(tables[static_cast<size_t>(lookups[i].table)], lookups[i].keys, begin, end);
      });
}

}  // namespace sok::cpu
