// SPDX-License-Identifier: Apache-2.0
// initialize: initial rows. Compiled without fused multiply-adds.
#include "table/initial_value.h"

#include "common/memory.h"
#include "common/parallel.h"
#include "cpu/contents.h"
#include "cpu/stages.h"

namespace sok::cpu {

void initialize(const sok_context& context, const sok_initializer& initializer, const int64_t* keys, int64_t first_key,
                int64_t key_stride, int64_t num_rows, int64_t dimension, const Floats& rows) {
  const InitialValue value(initializer);
  const bool is_rounded = rows.dtype != SOK_FLOAT32;
  const Buffer<float> scratch(context, is_rounded ? scratch_row(dimension) * num_workers(context) : 0);
  Chunks chunks;
  chunks.add(num_rows, items_per_task(1 << 16, 4 * dimension));
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t worker) {
    const Chunks::Range range = chunks[task];
    for (int64_t i = range.begin; i < range.end; ++i) {
      // Keys wrap around like the unsigned numbers that the counters are.
      const uint64_t key = keys != nullptr ? static_cast<uint64_t>(keys[i])
                                           : static_cast<uint64_t>(first_key) +
                                                 static_cast<uint64_t>(i) * static_cast<uint64_t>(key_stride);
      float* const row = is_rounded ? scratch.data() + scratch_row(dimension) * worker
                                    : static_cast<float*>(rows.data) + i * dimension;
      for (int64_t column = 0; column < dimension; column += 4) {
        float block[4];
        value.columns(key, static_cast<uint32_t>(column / 4), block);
        const int64_t count = std::min<int64_t>(4, dimension - column);
        for (int64_t c = 0; c < count; ++c) row[column + c] = block[c];
      }
      if (is_rounded) kernels().round_to(row, dimension, rows.at(i * dimension).data, rows.dtype);
    }
  });
}

}  // namespace sok::cpu
