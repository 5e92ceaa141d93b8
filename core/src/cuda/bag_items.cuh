// SPDX-License-Identifier: Apache-2.0
// What combine_bags and spread_bags walk: the pooled vectors of each lookup, in pieces of one access each, beside the
// vectors of their parts.
#ifndef SOK_CUDA_BAG_ITEMS_CUH_
#define SOK_CUDA_BAG_ITEMS_CUH_

#include <cstdint>
#include <vector>

#include "common/bag_parts.h"
#include "cuda/launch.h"
#include "cuda/placement.cuh"
#include "cuda/upload.h"

namespace sok::cuda {

constexpr int kBagPieces = 2;  // of each thread, so that several accesses are on their way

// The bags of one lookup.
struct BagItem {
  Vectors pooled;  // data nullptr: zeros
  const int64_t* row_splits;
  int64_t num_pieces;
  int32_t combiner;
  uint32_t pieces_per_bag;
  uint32_t first_offset;  // of its parts
  uint32_t num_parts;
  uint32_t first_block;
};

// The items of one width, for one launch.
struct BagItems {
  std::vector<BagItem> items;
  int64_t num_blocks = 0;
  size_t place = 0;  // in the upload
};

struct BagLaunch {
  const BagItem* items;
  const int64_t* offsets;  // where the vectors of each part begin
  float* floats;           // the messages
  uint32_t num_items;
};

class BagPlan {
 public:
  // pooled[i]: of lookup i.
  BagPlan(const std::vector<Lookup>& lookups, const BagParts& parts, const std::vector<Vectors>& pooled,
          const float* floats, Upload& upload) {
    std::vector<std::vector<int64_t>> of_lookup(lookups.size());
    for (const BagPart& part : parts.parts()) of_lookup[static_cast<size_t>(part.lookup)].push_back(part.first_element);
    std::vector<int64_t> offsets;
    for (size_t i = 0; i < lookups.size(); ++i) {
      const int64_t dimension = lookups[i].id.dimension;
      bool aligned = is_aligned(floats) && is_aligned(pooled[i].data) && pooled[i].stride % 4 == 0;
      for (const int64_t offset : of_lookup[i]) aligned &= offset % 4 == 0;
      const int width = width_of(dimension, aligned);
      BagItems& list = width == 4 ? wide_ : narrow_;
      BagItem item = {};
      item.pooled = pooled[i];
      item.row_splits = lookups[i].row_splits;
      item.combiner = lookups[i].combiner;
      item.pieces_per_bag = static_cast<uint32_t>(dimension / width);
      item.num_pieces = lookups[i].num_bags * item.pieces_per_bag;
      item.first_offset = static_cast<uint32_t>(offsets.size());
      item.num_parts = static_cast<uint32_t>(of_lookup[i].size());
      item.first_block = grid_of(list.num_blocks);
      offsets.insert(offsets.end(), of_lookup[i].begin(), of_lookup[i].end());
      if (item.num_pieces == 0) continue;
      list.num_blocks += ceil_div(item.num_pieces, kBagPieces * kThreads);
      list.items.push_back(item);
    }
    offsets_ = upload.add(offsets);
    wide_.place = upload.add(wide_.items);
    narrow_.place = upload.add(narrow_.items);
  }

  // launch(blocks, the arguments of the kernel, whether a piece is four elements) for the widths that occur.
  template <typename Launch>
  void run(const Upload& upload, float* floats, Launch&& launch) const {
    for (const BagItems* list : {&wide_, &narrow_}) {
      if (list->num_blocks == 0) continue;
      launch(list->num_blocks,
             BagLaunch{upload.at<BagItem>(list->place), upload.at<int64_t>(offsets_), floats,
                       static_cast<uint32_t>(list->items.size())},
             list == &wide_);
    }
  }

 private:
  BagItems wide_, narrow_;
  size_t offsets_;
};

// Calls f(item, the scale of the bag, where the piece is among the item's pooled vectors, and among those of a part)
// for this thread's pieces of kWidth elements.
template <int kWidth, typename F>
__device__ __forceinline__ void for_bag_pieces(const BagLaunch& p, F f) {
  const BagItem& item =
      p.items[last_at_or_before(p.num_items, blockIdx.x, [&](uint32_t at) { return __ldg(&p.items[at].first_block); })];
  const int64_t first = static_cast<int64_t>(blockIdx.x - item.first_block) * (kBagPieces * kThreads) + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kBagPieces; ++k) {
    const int64_t piece = first + k * kThreads;
    if (piece >= item.num_pieces) continue;
    const int64_t bag = piece / item.pieces_per_bag;
    const int64_t column = (piece - bag * item.pieces_per_bag) * kWidth;
    f(item, bag_scale(item.combiner, item.row_splits, bag), item.pooled.offset(bag) + column, piece * kWidth);
  }
}

}  // namespace sok::cuda

#endif  // SOK_CUDA_BAG_ITEMS_CUH_
