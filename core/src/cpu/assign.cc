// SPDX-License-Identifier: Apache-2.0
// assign: rows by global key.
#include <algorithm>
#include <cstring>

#include "common/parallel.h"
#include "cpu/contents.h"
#include "cpu/stages.h"

namespace sok::cpu {

void assign(const sok_context& context, const Table& table, const Integers& keys, const Floats& values,
            const Floats& target) {
  const Placement placement = table.placement;
  Chunks chunks;
  chunks.add(keys.size, 1 << 14);
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    check_keys(table, keys, range.begin, range.end);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int32_t owner = placement.owner_of(integer_at(keys, i));
      SOK_CHECK_STATUS(SOK_OUT_OF_RANGE, owner == placement.rank, "table '", table.name, "': key ", integer_at(keys, i),
                       " belongs to rank ", owner, ", not to rank ", placement.rank);
    }
  });
  // Each worker writes the slots of some pages, in the order of the keys: of equal keys the last one counts.
  constexpr int64_t kPage = 64;
  const size_t row_bytes = static_cast<size_t>(table.dimension * target.item_size());
  const bool is_rounded = values.dtype != target.dtype;
  const int64_t parts = keys.size * table.dimension < (1 << 16) ? 1 : num_workers(context);
  parallel_for(context, parts, [&](int64_t part, int32_t) {
    for (int64_t i = 0; i < keys.size; ++i) {
      const int64_t slot = placement.slot_of(integer_at(keys, i));
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
