// SPDX-License-Identifier: Apache-2.0
// assign: rows by slot.
#include <algorithm>
#include <cstring>

#include "common/parallel.h"
#include "cpu/contents.h"
#include "cpu/stages.h"

namespace sok::cpu {

void assign(const sok_context& context, const Columns& table, const Integers& slots, const Floats& values,
            const Floats& target) {
  Chunks chunks;
  chunks.add(slots.size, 1 << 14);
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    check_slots(table, slots, range.begin, range.end);
  });
  // Each worker writes the slots of some pages, in the order in which they come: of equal ones the last one counts.
  constexpr int64_t kPage = 64;
  const size_t row_bytes = static_cast<size_t>(table.dimension * target.item_size());
  const bool is_rounded = values.dtype != target.dtype;
  const int64_t parts = slots.size * table.dimension < (1 << 16) ? 1 : num_workers(context);
  parallel_for(context, parts, [&](int64_t part, int32_t) {
    for (int64_t i = 0; i < slots.size; ++i) {
      const int64_t slot = integer_at(slots, i);
      if (parts > 1 && slot / kPage % parts != part) continue;
      const void* const from = values.at(i * table.dimension).data;
      void* const to = target.at(slot * table.dimension).data;
      if (is_rounded) {
        kernels().round_to(static_cast<const float*>(from), table.dimension, to, target.dtype);
      } else {
        std::memcpy(to, from, row_bytes);
      }
    }
  });
}

}  // namespace sok::cpu
