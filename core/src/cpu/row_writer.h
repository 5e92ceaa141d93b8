// SPDX-License-Identifier: Apache-2.0
// For files that are compiled without fused multiply-adds (table/initial_value.h).
#ifndef SOK_CPU_ROW_WRITER_H_
#define SOK_CPU_ROW_WRITER_H_

#include <algorithm>
#include <cstdint>

#include "common/call.h"
#include "common/memory.h"
#include "common/parallel.h"
#include "cpu/isa.h"
#include "table/initial_value.h"

namespace sok::cpu {

// Writes initial rows of a table's dtype, each of them on a worker of the context's.
class RowWriter {
 public:
  RowWriter(const sok_context& context, const sok_initializer& initializer, int64_t dimension, sok_dtype dtype)
      : value_(initializer),
        dimension_(dimension),
        dtype_(dtype),
        scratch_(context, dtype != SOK_FLOAT32 ? scratch_row(dimension) * num_workers(context) : 0) {}

  void write(uint64_t key, void* row, int32_t worker) const {
    float* const wide =
        dtype_ != SOK_FLOAT32 ? scratch_.data() + scratch_row(dimension_) * worker : static_cast<float*>(row);
    for (int64_t column = 0; column < dimension_; column += 4) {
      float four[4];
      value_.columns<true>(key, static_cast<uint32_t>(column / 4), four);
      std::copy_n(four, std::min<int64_t>(4, dimension_ - column), wide + column);
    }
    if (dtype_ != SOK_FLOAT32) kernels().round_to(wide, dimension_, row, dtype_);
  }

 private:
  const InitialValue value_;
  const int64_t dimension_;
  const sok_dtype dtype_;
  const Buffer<float> scratch_;
};

}  // namespace sok::cpu

#endif  // SOK_CPU_ROW_WRITER_H_
