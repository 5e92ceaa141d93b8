// SPDX-License-Identifier: Apache-2.0
// Generations of slots: set_generations; check_generations, whether the slots of a gradient still have the keys that
// they were located for.
#include "cpu/contents.h"
#include "cpu/stages.h"

namespace sok::cpu {

void set_generations(const sok_context& context, const int64_t* slots, int64_t n, const Generations& to) {
  Chunks chunks;
  chunks.add(n, 1 << 14);
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t slot = slots != nullptr ? slots[i] : i;
      if (slot >= 0) to.since[slot] = to.generation;
    }
  });
}

void check_generations(const sok_context& context, const Columns& table, const std::vector<Gradient>& gradients) {
  Chunks chunks;
  for (const Gradient& part : gradients) chunks.add(part.is_older_than(table) ? part.slots.size : 0, 1 << 14);
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    const Gradient& part = gradients[static_cast<size_t>(range.item)];
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t slot = integer_at(part.slots, i);
      if (has_lost_key(table.since, table.num_slots, slot, part.generation))
        throw_found({Fault::kLostKey, table.number, slot, part.generation}, table.name);
    }
  });
}

}  // namespace sok::cpu
