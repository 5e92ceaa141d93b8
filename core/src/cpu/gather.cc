// SPDX-License-Identifier: Apache-2.0
// gather: slots -> rows, in send order.
#include "cpu/blocks.h"
#include "cpu/stages.h"

namespace sok::cpu {

void gather(const sok_context& context, const std::vector<Table>& tables, int32_t num_sources, const int64_t* counts,
            const int64_t* /*keys*/, const int64_t* slots, float* rows) {
  const Blocks blocks(context, tables, num_sources, counts, [](const Table& table) { return 8 * table.dimension; });
  const int64_t total = blocks.num_rows();
  parallel_for(context, blocks.num_tasks(), [&](int64_t task, int32_t) {
    const Blocks::Range range = blocks[task];
    const Table& table = *range.table;
    check_slots(table, {slots, total, true}, range.begin, range.end);
    const IndexedRows source = {table.weight, table.dimension, slots + range.begin, true};
    // Each row is a bag of its own.
    const PoolTask copy = {source, nullptr, nullptr, rows + range.element, table.dimension, SOK_SUM};
    kernels().pool(copy, 0, range.end - range.begin);
  });
}

}  // namespace sok::cpu
