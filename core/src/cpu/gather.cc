// SPDX-License-Identifier: Apache-2.0
// gather: slots -> rows, in send order.
#include <algorithm>
#include <cstring>

#include "cpu/blocks.h"
#include "cpu/stages.h"

namespace sok::cpu {
namespace {

void copy_rows(const Table& table, const int64_t* slots, int64_t count, const Floats& to) {
  constexpr int64_t kAhead = 16;
  const int64_t bytes = table.dimension * table.weight.item_size();
  const char* const from = static_cast<const char*>(table.weight.data);
  char* const out = static_cast<char*>(to.data);
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const char* const next = from + slots[i + kAhead] * bytes;
      for (int64_t line = 0; line < std::min<int64_t>(bytes, 512); line += 64) __builtin_prefetch(next + line);
    }
    std::memcpy(out + i * bytes, from + slots[i] * bytes, static_cast<size_t>(bytes));
  }
}

}  // namespace

void gather(const sok_context& context, const std::vector<Table>& tables, int32_t num_sources, const int64_t* counts,
            const int64_t* /*keys*/, const int64_t* slots, const Floats& rows) {
  const Blocks blocks(context, tables, num_sources, counts, [](const Table& table) { return 8 * table.dimension; });
  const int64_t total = blocks.num_rows();
  parallel_for(context, blocks.num_tasks(), [&](int64_t task, int32_t) {
    const Blocks::Range range = blocks[task];
    const Table& table = *range.table;
    check_slots(table, {slots, total, true}, range.begin, range.end);
    const Floats& weight = table.weight;
    if (weight.dtype != SOK_FLOAT32 && rows.dtype == weight.dtype) {
      copy_rows(table, slots + range.begin, range.end - range.begin, rows.at(range.element));
      return;
    }
    const IndexedRows source = {weight.data, weight.dtype, table.dimension, slots + range.begin, true};
    // Each row is a bag of its own.
    const PoolTask copy = {source,          nullptr,         nullptr, static_cast<float*>(rows.at(range.element).data),
                           table.dimension, table.dimension, SOK_SUM};
    kernels().pool(copy, 0, range.end - range.begin);
  });
}

}  // namespace sok::cpu
