// SPDX-License-Identifier: Apache-2.0
// Generations of slots: set_generations; lower_generations; check_generations, whether the slots of a gradient still
// have the keys that they were located for.
#include <algorithm>

#include "cpu/contents.h"
#include "cpu/stages.h"
#include "table/dynamic_table.h"

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

void lower_generations(const sok_context& context, const char*, int64_t by, int64_t n, int32_t* since,
                       int64_t* scores) {
  Chunks chunks;
  chunks.add(n, 1 << 14);
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    for (int64_t i = range.begin; i < range.end; ++i) {
      if (since[i] != DynamicTable::kNoKey) since[i] = static_cast<int32_t>(std::max<int64_t>(0, since[i] - by));
      if (scores != nullptr && scores[i] != Eviction::kNoKey) scores[i] = Uses::lowered(scores[i], by);
    }
  });
}

void check_generations(const sok_context& context, const Columns& table, const std::vector<Gradient>& gradients) {
  Chunks chunks;
  for (const Gradient& summand : gradients) chunks.add(summand.slots.size, 1 << 14);
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    const Gradient& summand = gradients[static_cast<size_t>(range.item)];
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t slot = integer_at(summand.slots, i);
      if (has_lost_key(table.since, table.num_slots, slot, summand.generation))
        throw_found({Fault::kLostKey, table.number, slot, summand.generation}, table.name);
    }
  });
}

}  // namespace sok::cpu
