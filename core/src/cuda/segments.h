// SPDX-License-Identifier: Apache-2.0
// Sums of gradient rows over runs of equal keys, and what is done with each sum: the loop of apply, reduce and spread.
//
// Entries lie in ascending order of their keys; those of one table are in a row, from a multiple of 32 on and padded
// to a multiple of 32 with the table's padding key. A group of threads takes a chunk of 32 entries. A run that ends
// in the chunk where it begins, or early in the next one, is finished by the group of the first. Of a longer run the
// sum over each chunk becomes an entry of a shorter list, two entries a chunk, on which the same kernel runs again,
// until no table has more than one chunk. So a hot row is spread over many blocks, nothing needs atomics, and the
// order of all additions follows from the keys alone.
#ifndef SOK_CUDA_SEGMENTS_H_
#define SOK_CUDA_SEGMENTS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "common/memory.h"
#include "common/optimizer_constants.h"
#include "cuda/context.h"
#include "cuda/upload.h"
#include "sok/types.h"

namespace sok::cuda {

constexpr int kChunk = 32;               // entries
constexpr int kFollowed = 8;             // entries of the next chunk
constexpr uint32_t kNoRow = UINT32_MAX;  // a value that adds nothing

// Where an entry's gradient lies, for entries whose rows are not simply numbered.
struct alignas(16) EntrySource {
  const float* row;  // nullptr: adds nothing
  float scale;
  uint32_t dimension;  // of the row
};

struct SegmentTable {
  uint64_t first_key;      // key of slot 0
  uint64_t padding_key;    // of entries that stand for nothing
  void* weight;            // the sum of key k goes to weight + (k - first_key) * stride,
  const int64_t* offsets;  // or to weight + offsets[k - first_key] when not nullptr
  float* states[3];
  const float* values;      // gradient row of value v: values + v * value_stride
  const float* row_scales;  // times row_scales[v] when not nullptr
  uint32_t dimension;
  uint32_t stride;
  uint32_t value_stride;
  OptimizerConstants constants;
};

// A table's part of one level's list.
struct SegmentSpan {
  uint32_t first_block;
  uint32_t first_entry;
  uint32_t num_chunks;
  uint32_t next_entry;  // of this table in the next level's list
};

template <typename Key>
struct SegmentLevel {
  const SegmentTable* tables;  // [num_tables]
  const SegmentSpan* spans;    // [num_tables]
  uint32_t num_tables;
  int32_t log_lanes;
  bool one_row_a_table;  // of the grid of blocks; else the tables' blocks follow one another
  const Key* keys;
  const uint32_t* values;
  const EntrySource* sources;  // first level: nullptr, or values name these
  const float* partials;       // later levels: the rows that values name
  Key* next_keys;              // nullptr: no table has a next level
  uint32_t* next_values;
  float* next_partials;
  const int32_t* gate;  // do nothing when *gate != 0
  uint32_t partial_stride;
  sok_dtype dtype;  // of the tables' weights
};

// What is done with a sum: stored, or an optimizer's step. Variants as in segments.cu.
enum class Rule : int32_t {
  kStore,
  kSgd,
  kMomentum,
  kAdagrad,
  kRowwiseAdagrad,
  kAdam,
  kAdamax,
  kAdadelta,
  kRmsProp,
  kRmsPropMomentum,
  kRmsPropCentered,
  kRmsPropCenteredMomentum,
  kFtrl,
  kFtrlPower,
};

Rule rule_of(const OptimizerConstants& constants);

// Tables that one launch handles: `dtype` of their weights, `width` elements a thread, 2^log_lanes threads a row.
struct SegmentGroup {
  Rule rule = Rule::kStore;
  sok_dtype dtype = SOK_FLOAT32;
  int width = 1;
  int log_lanes = 0;
  std::vector<SegmentTable> tables;
  std::vector<int64_t> first_entries;  // in the sorted list, multiples of kChunk
  std::vector<int64_t> num_entries;    // padded, multiples of kChunk
};

// The launches for one group; made before its Upload is sent, run afterwards.
class SegmentPlan {
 public:
  SegmentPlan(const SegmentGroup& group, Upload& upload);

  // keys, values: the sorted list. sources: nullptr, or what values name.
  template <typename Key>
  void run(const Scope& scope, const Upload& upload, const Key* keys, const uint32_t* values,
           const EntrySource* sources, const int32_t* gate) const;

 private:
  struct Level {
    size_t spans;
    int64_t num_blocks;
    int64_t most_blocks;   // of a table
    int64_t next_entries;  // of all tables; 0 in the last level
  };

  Rule rule_;
  sok_dtype dtype_;
  int width_, log_lanes_;
  uint32_t num_tables_;
  uint32_t partial_stride_ = 0;
  size_t tables_ = 0;
  bool scaled_ = false;  // some table has row_scales
  std::vector<Level> levels_;
};

template <typename Key>
using SegmentLauncher = void (*)(const SegmentLevel<Key>& level, int width, bool plain, dim3 blocks,
                                 cudaStream_t stream);

// Launchers live in the files that compile their kernels; nullptr where a file does not know the rule.
template <typename Key>
SegmentLauncher<Key> store_launcher(Rule rule);
template <typename Key>
SegmentLauncher<Key> sgd_launcher(Rule rule);
template <typename Key>
SegmentLauncher<Key> adagrad_launcher(Rule rule);
template <typename Key>
SegmentLauncher<Key> adam_launcher(Rule rule);
template <typename Key>
SegmentLauncher<Key> adadelta_launcher(Rule rule);
template <typename Key>
SegmentLauncher<Key> rmsprop_launcher(Rule rule);
template <typename Key>
SegmentLauncher<Key> ftrl_launcher(Rule rule);

}  // namespace sok::cuda

#endif  // SOK_CUDA_SEGMENTS_H_
