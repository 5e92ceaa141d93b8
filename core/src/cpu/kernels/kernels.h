// SPDX-License-Identifier: Apache-2.0
// The inner loops of the CPU stages, compiled once for each instruction set (kernels.cc). Arguments are plain data and
// nothing here includes the C++ library: an inline function compiled for AVX-512 must never be the copy that the linker
// keeps for the rest of the program.
//
// Sums run over the entries of a bag or a segment in their order, column by column, so results do not depend on how the
// work is cut into calls. Kernels trust their arguments; the stages check contents with find_* first.
#ifndef SOK_CPU_KERNELS_KERNELS_H_
#define SOK_CPU_KERNELS_KERNELS_H_

#include <stdint.h>

#include "common/optimizer_constants.h"
#include "sok/types.h"

namespace sok::cpu {

// Elements of rows of 16 bits. Arithmetic is in float32.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// Rows given by numbers: row i of a task is rows + index[i] * stride elements.
struct IndexedRows {
  const void* rows;
  sok_dtype dtype;  // SOK_FLOAT32, SOK_FLOAT16 or SOK_BFLOAT16
  int64_t stride;
  const void* index;  // int32 or int64
  bool index_64bit;
};

struct PoolTask {
  IndexedRows source;
  const int64_t* row_splits;  // nullptr: entry i is bag i
  const float* weights;       // nullptr: all 1
  float* output;              // [bags, dimension]
  int64_t output_stride;      // elements from a bag to the next
  int64_t dimension;
  int32_t combiner;
};

struct WeightGradientTask {
  IndexedRows source;
  const int64_t* row_splits;
  const float* weights;
  const float* output_gradient;  // [bags, dimension]
  int64_t gradient_stride;       // elements from a bag to the next
  float* weight_gradient;        // [entries]
  int64_t dimension;
  int32_t combiner;
};

// Sums of scaled rows. Segment u holds order[splits[u] .. splits[u + 1]); those numbers name rows and scales.
struct Segments {
  const float* base;         // row p is base + p * stride, or
  const float* const* rows;  // rows[p] when not nullptr
  const float* scales;       // nullptr: all 1
  const uint32_t* order;     // nullptr: 0, 1, 2, ...
  const int32_t* splits;     // nullptr: one entry a segment
  int64_t dimension;
  int64_t stride;
};

struct UpdateTask {
  Segments gradients;
  const uint32_t* slots32;  // slot of segment u
  const int64_t* slots64;   // used when slots32 is nullptr
  void* weight;
  sok_dtype dtype;  // of `weight`, as in IndexedRows
  float* states[3];
  OptimizerConstants constants;
};

// A row in float32, padded to whole cache lines.
static inline int64_t scratch_row(int64_t dimension) { return (dimension + 15) / 16 * 16; }

struct Kernels {
  const char* name;

  // The first position in [begin, end) whose number is not in [0, limit), or -1.
  int64_t (*find_outside)(const void* index, bool is_64bit, int64_t begin, int64_t end, uint64_t limit);
  // The first bag in [begin, end) without 0 <= row_splits[b] <= row_splits[b + 1] <= limit, or -1.
  int64_t (*find_bad_split)(const int64_t* row_splits, int64_t begin, int64_t end, int64_t limit);

  // Bags [begin, end).
  void (*pool)(const PoolTask& task, int64_t begin, int64_t end);
  void (*weight_gradient)(const WeightGradientTask& task, int64_t begin, int64_t end);
  // What the combiner multiplies entries of bags [begin, end) by: scales[entry] with weights, else scales[bag].
  void (*bag_scales)(const int64_t* row_splits, const float* weights, int32_t combiner, int64_t begin, int64_t end,
                     float* scales);

  // Segments [begin, end): sums to output[u - begin], or through the optimizer into the rows. `scratch` has room for
  // two rows of scratch_row(dimension) elements.
  void (*sum_segments)(const Segments& segments, int64_t begin, int64_t end, float* output);
  void (*update)(const UpdateTask& task, int64_t begin, int64_t end, float* scratch);

  // Rounds float32 to float16 or bfloat16.
  void (*round_to)(const float* from, int64_t elements, void* to, sok_dtype dtype);
};

namespace baseline {
extern const Kernels kKernels;
}
#ifdef SOK_X86_KERNELS
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

}  // namespace sok::cpu

#endif  // SOK_CPU_KERNELS_KERNELS_H_
