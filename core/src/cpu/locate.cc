// SPDX-License-Identifier: Apache-2.0
// locate: key -> slot on the owner.
#include "cpu/blocks.h"
#include "cpu/stages.h"

namespace sok::cpu {

void locate(const sok_context& context, const std::vector<Table>& tables, int32_t num_sources, const int64_t* counts,
            const int64_t* keys, int64_t* slots, uint32_t /*flags*/) {
  const Blocks blocks(context, tables, num_sources, counts, [](const Table&) { return 32; });
  const int64_t total = blocks.num_rows();
  parallel_for(context, blocks.num_tasks(), [&](int64_t task, int32_t) {
    const Blocks::Range range = blocks[task];
    const Table& table = *range.table;
    const Placement placement = table.placement;
    check_keys(table, {keys, total, true}, range.begin, range.end);
    if (placement.owner >= 0 || placement.num_ranks == 1) {
      SOK_CHECK_STATUS(SOK_OUT_OF_RANGE,
                       placement.owner < 0 || placement.owner == placement.rank || range.begin == range.end, "table '",
                       table.name, "': key ", keys[range.begin], " belongs to rank ", placement.owner,
                       " and came to rank ", placement.rank);
      std::copy(keys + range.begin, keys + range.end, slots + range.begin);
      return;
    }
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t slot = keys[i] / placement.num_ranks;
      const int64_t owner = keys[i] - slot * placement.num_ranks;
      SOK_CHECK_STATUS(SOK_OUT_OF_RANGE, owner == placement.rank, "table '", table.name, "': key ", keys[i],
                       " belongs to rank ", owner, " and came to rank ", placement.rank);
      slots[i] = slot;
    }
  });
}

}  // namespace sok::cpu
