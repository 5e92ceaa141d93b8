// SPDX-License-Identifier: Apache-2.0
// bags_from_coordinates: coordinates of sparse tensors -> row splits.
#include <algorithm>
#include <atomic>

#include "common/memory.h"
#include "common/parallel.h"
#include "cpu/stages.h"

namespace sok::cpu {

void bags_from_coordinates(const sok_context& context, const int64_t* rows, int64_t num_rows, int64_t stride,
                           int64_t num_bags, int64_t* row_splits, int64_t* order, int32_t* sorted) {
  Chunks chunks;
  chunks.add(num_rows, 1 << 14);
  std::atomic<bool> ascending{true};
  // As if the entries were in order: each step from one row to a later one ends the bags between.
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    bool rising = true;
    int64_t before = range.begin == 0 ? -1 : rows[(range.begin - 1) * stride];
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t row = rows[i * stride];
      SOK_CHECK_STATUS(SOK_OUT_OF_RANGE, static_cast<uint64_t>(row) < static_cast<uint64_t>(num_bags), "entry ", i,
                       " is in row ", row, ", outside [0, ", num_bags, ")");
      order[i] = i;
      // `before` of another chunk has not been checked when it is negative or too large; rising then ends or fails.
      rising = rising && before <= row && before >= -1;
      if (rising) {
        // Of entries that turn out unsorted several chunks may write one bag; all is written again then.
        for (int64_t bag = before + 1; bag <= row; ++bag) {
          std::atomic_ref<int64_t>(row_splits[bag]).store(i, std::memory_order_relaxed);
        }
      }
      before = row;
    }
    if (!rising) ascending.store(false, std::memory_order_relaxed);
  });
  *sorted = ascending.load(std::memory_order_relaxed) ? 1 : 0;
  if (*sorted == 1) {
    const int64_t last = num_rows == 0 ? -1 : rows[(num_rows - 1) * stride];
    for (int64_t bag = last + 1; bag <= num_bags; ++bag) row_splits[bag] = num_rows;
    return;
  }
  std::fill(row_splits, row_splits + num_bags + 1, 0);
  for (int64_t i = 0; i < num_rows; ++i) ++row_splits[rows[i * stride] + 1];
  for (int64_t bag = 0; bag < num_bags; ++bag) row_splits[bag + 1] += row_splits[bag];
  const Buffer<int64_t> next(context, num_bags);
  std::copy(row_splits, row_splits + num_bags, next.data());
  for (int64_t i = 0; i < num_rows; ++i) order[next[rows[i * stride]]++] = i;
}

}  // namespace sok::cpu
