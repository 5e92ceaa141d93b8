// SPDX-License-Identifier: Apache-2.0
// combine: exchanged rows -> pooled vectors.
#include "cpu/pool.h"
#include "cpu/stages.h"

namespace sok::cpu {

void combine(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
             const int64_t* inverse, const Floats& rows, int64_t num_elements) {
  const ExchangedRows exchanged(tables, lookups, inverse, rows, num_elements);
  pool_lookups(
      context, tables, lookups, [&](size_t i) { return exchanged.source(i); },
      [&](size_t i, int64_t begin, int64_t end) { exchanged.check(i, begin, end); });
}

}  // namespace sok::cpu
