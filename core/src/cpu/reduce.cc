// SPDX-License-Identifier: Apache-2.0
// reduce: the gradient of a table as distinct slots and their sums.
#include "cpu/contents.h"
#include "cpu/gradients.h"
#include "cpu/stages.h"

namespace sok::cpu {

int64_t reduce(const sok_context& context, const Columns& table, const std::vector<Gradient>& gradients, int64_t* slots,
               float* values) {
  const GroupedGradients grouped(context, {{&table, &gradients}}, GroupedGradients::Slots::kAscending);
  const GroupedGradients::Result result = grouped[0];
  Chunks chunks;
  const int64_t row_bytes = 8 * table.dimension;
  chunks.add(result.count, items_per_task(task_bytes(context, result.count * row_bytes), row_bytes));
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    for (int64_t u = range.begin; u < range.end; ++u) {
      slots[u] = result.slots32 != nullptr ? static_cast<int64_t>(result.slots32[u]) : result.slots64[u];
    }
    kernels().sum_segments(result.segments, range.begin, range.end, values + range.begin * table.dimension);
  });
  return result.count;
}

}  // namespace sok::cpu
