// SPDX-License-Identifier: Apache-2.0
// Rows picked by numbers and summed bag by bag: what gather, combine and gather_combine have in common.
#ifndef SOK_CUDA_POOL_H_
#define SOK_CUDA_POOL_H_

#include <cstdint>
#include <vector>

#include "common/error_record.h"
#include "cuda/context.h"

namespace sok::cuda {

// One batch of bags. Row i of it is rows + index[i] * stride, `dimension` elements; index[i] must be in [0, limit).
struct PoolItem {
  const void* rows;           // float32, float16 or bfloat16
  const void* index;          // int64 or int32
  const int64_t* row_splits;  // nullptr: each entry is a bag of its own
  const float* weights;       // nullptr: all 1
  float* output;              // [num_bags, dimension]
  int64_t output_stride;      // elements from a bag to the next
  int64_t limit;
  uint32_t num_entries;
  uint32_t num_bags;
  uint32_t dimension;
  uint32_t stride;
  uint32_t first_block;  // pool() sets this, width, deep and the logarithms
  int32_t table;         // position in the call, for errors
  uint8_t combiner;
  bool index_64bit;
  uint8_t dtype;      // sok_dtype of rows
  uint8_t multiple;   // rows begin at multiples of so many elements, as far as that is a power of two up to 8
  uint8_t width;      // elements a thread
  bool deep;          // long bags of wide rows
  uint8_t log_lanes;  // 2^log_lanes threads share a row
  uint8_t log_bags;   // they take 2^log_bags bags, one after another
};

// What `multiple` is for rows of `dimension` elements one after another.
inline uint8_t multiple_of(int64_t dimension) { return dimension % 8 == 0 ? 8 : dimension % 4 == 0 ? 4 : 1; }

// Enqueues one launch for each 128 items of a kind (dtype, width). `fault`: what a bad index is.
void pool(const Scope& scope, const std::vector<PoolItem>& items, Fault fault, sok_error_record* errors);

}  // namespace sok::cuda

#endif  // SOK_CUDA_POOL_H_
