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
  const float* rows;
  const void* index;          // int64 or int32
  const int64_t* row_splits;  // nullptr: each entry is a bag of its own
  const float* weights;       // nullptr: all 1
  float* output;              // [num_bags, dimension]
  int64_t limit;
  uint32_t num_entries;
  uint32_t num_bags;
  uint32_t dimension;
  uint32_t stride;
  uint32_t first_block;  // pool() sets this and the logarithms
  int32_t table;         // position in the call, for errors
  uint8_t combiner;
  bool index_64bit;
  bool unaligned;     // rows may start anywhere, so that 16-byte accesses are out
                      // of the question
  uint8_t log_lanes;  // 2^log_lanes threads share a row
  uint8_t log_bags;   // they take 2^log_bags bags, one after another
};

// Enqueues one launch for each 128 items of a kind (rows of 16-byte pieces, others). `fault`: what a bad index is.
void pool(const Scope& scope, std::vector<PoolItem>& items, Fault fault, sok_error_record* errors);

}  // namespace sok::cuda

#endif  // SOK_CUDA_POOL_H_
