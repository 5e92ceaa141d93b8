// SPDX-License-Identifier: Apache-2.0
// A group of threads takes some bags in a row and walks through all their entries at once, so that rows of several
// short bags are on their way together. Indices of the next rows are asked for before the present ones are added up.
#include "cuda/pool.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/report.cuh"
#include "cuda/splits.cuh"
#include "cuda/vector.cuh"
#include "sok/lookup.h"

namespace sok::cuda {
namespace {

constexpr int kItems = 128;  // of a launch: parameters of 10 KB
constexpr int64_t kEnoughThreads = 132 * 2048;

struct PoolParameters {
  PoolItem items[kItems];
  uint32_t num_items;
  uint32_t num_blocks;
  Fault fault;
  sok_error_record* errors;
};

// Items mostly have equally many blocks, so the guess is right or nearly so.
__device__ __forceinline__ const PoolItem& item_of_block(const PoolParameters& p) {
  uint32_t i = static_cast<uint32_t>(static_cast<uint64_t>(blockIdx.x) * p.num_items / p.num_blocks);
  while (p.items[i].first_block > blockIdx.x) --i;
  while (i + 1 < p.num_items && p.items[i + 1].first_block <= blockIdx.x) ++i;
  return p.items[i];
}

// kInFlight: rows that a group asks for at once.
template <int kWidth, int kInFlight, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) pool_kernel(const __grid_constant__ PoolParameters p) {
  __shared__ uint32_t ends[kThreads + 1];
  const PoolItem& item = item_of_block(p);
  const uint32_t lanes = 1u << item.log_lanes;
  const uint32_t bags_of_block = (kThreads >> item.log_lanes) << item.log_bags;
  const uint32_t first_bag = (blockIdx.x - item.first_block) * bags_of_block;
  const uint32_t count = min(bags_of_block, item.num_bags - first_bag);
  if (!load_splits(item.row_splits, item.num_bags, item.num_entries, first_bag, count, item.table, ends, p.errors))
    return;

  const uint32_t lane = threadIdx.x & (lanes - 1);
  const uint32_t begin_bag = (threadIdx.x >> item.log_lanes) << item.log_bags;
  const uint32_t end_bag = min(begin_bag + (1u << item.log_bags), count);
  if (begin_bag >= end_bag) return;
  const uint32_t begin = ends[begin_bag], end = ends[end_bag];
  const uint32_t dimension = item.dimension;
  const bool is_64bit = item.index_64bit;
  const int64_t limit = item.limit;
  const uint8_t combiner = item.combiner;
  const float* const weights = item.weights;

  uint32_t wrong = UINT32_MAX;  // an entry whose number is outside

  for (uint32_t base = 0; base < dimension; base += lanes * kWidth) {
    const uint32_t column = base + lane * kWidth;
    const bool active = column < dimension;
    const float* const rows = item.rows + column;
    float* output = item.output + static_cast<int64_t>(first_bag + begin_bag) * dimension + column;
    uint32_t bag = begin_bag;
    uint32_t bag_end = ends[bag + 1];
    Vector<kWidth> sum = zeros<kWidth>();
    float total = 0.0f;  // of weights, or of their squares

    const auto finish_bag = [&]() {
      if (combiner != SOK_SUM) {
        const float divisor = combiner == SOK_MEAN ? total : sqrtf(total);
        const float factor = 1.0f / divisor;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum.v[i] = divisor == 0.0f ? 0.0f : sum.v[i] * factor;
      }
      if (active) sum.store_streaming(output);
      output += dimension;
      ++bag;
      bag_end = ends[min(bag + 1, count)];
      sum = zeros<kWidth>();
      total = 0.0f;
    };

    int64_t next[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) next[k] = begin + k < end ? load_integer(item.index, is_64bit, begin + k) : 0;
    for (uint32_t entry = begin; entry < end; entry += kInFlight) {
      Vector<kWidth> row[kInFlight];
      float weight[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int64_t number = next[k];
        const bool inside = static_cast<uint64_t>(number) < static_cast<uint64_t>(limit);
        row[k] = zeros<kWidth>();
        if (entry + k < end) {
          if (!inside) wrong = entry + k;
          if (active && inside) row[k] = Vector<kWidth>::load_constant(rows + number * item.stride);
        }
      }
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const uint32_t ahead = entry + kInFlight + k;
        next[k] = ahead < end ? load_integer(item.index, is_64bit, ahead) : 0;
        weight[k] = weights != nullptr && entry + k < end ? __ldg(weights + entry + k) : 1.0f;
      }
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        if (entry + k < end) {
          while (entry + k >= bag_end) finish_bag();
          add_scaled(sum, weight[k], row[k]);
          total += combiner == SOK_SQRTN ? weight[k] * weight[k] : weight[k];
        }
      }
    }
    while (bag < end_bag) finish_bag();
  }
  if (wrong != UINT32_MAX) {
    report(p.errors, p.fault, item.table, load_integer(item.index, item.index_64bit, wrong), item.limit);
  }
}

int64_t blocks_of(const PoolItem& item) {
  const int64_t bags = (kThreads >> item.log_lanes) << item.log_bags;
  const int64_t blocks = ceil_div(item.num_bags, bags);
  return blocks == 0 && item.row_splits != nullptr ? 1 : blocks;  // row splits of no bags are checked too
}

template <int kWidth, int kInFlight, int kBlocks>
void launch(const Scope& scope, const std::vector<PoolItem>& items, Fault fault, sok_error_record* errors) {
  for (size_t first = 0; first < items.size(); first += kItems) {
    PoolParameters p;
    p.num_items = static_cast<uint32_t>(std::min<size_t>(kItems, items.size() - first));
    p.fault = fault;
    p.errors = errors;
    int64_t blocks = 0;
    for (uint32_t i = 0; i < p.num_items; ++i) {
      p.items[i] = items[first + i];
      p.items[i].first_block = static_cast<uint32_t>(blocks);
      blocks += blocks_of(p.items[i]);
    }
    p.num_blocks = static_cast<uint32_t>(blocks);
    SOK_LAUNCH((pool_kernel<kWidth, kInFlight, kBlocks>), blocks, scope.stream(), p);
  }
}

}  // namespace

void pool(const Scope& scope, std::vector<PoolItem>& items, Fault fault, sok_error_record* errors) {
  std::vector<PoolItem> deep, wide, narrow;
  int64_t threads = 0;
  for (PoolItem& item : items) {
    if (item.num_bags == 0 && item.row_splits == nullptr) continue;
    const bool aligned = is_aligned(item.rows) && is_aligned(item.output) && !item.unaligned;
    const int width = width_of(item.dimension, aligned);
    item.log_lanes = static_cast<uint8_t>(log_lanes_of(item.dimension, width));
    threads += int64_t{item.num_bags} << item.log_lanes;
    const bool is_deep = item.num_entries / 4 >= item.num_bags && item.log_lanes >= 3;
    (width == 1 ? narrow : is_deep ? deep : wide).push_back(item);
  }
  // As many bags a group as make about 32 entries, as long as every multiprocessor stays busy.
  const int spare = static_cast<int>(std::max<int64_t>(0, ceil_log2(threads / kEnoughThreads + 1) - 1));
  for (std::vector<PoolItem>* kind : {&deep, &wide, &narrow}) {
    for (PoolItem& item : *kind) {
      const int64_t mean = std::max<int64_t>(1, item.num_entries / std::max<uint32_t>(1, item.num_bags));
      const int wanted = mean >= 32 ? 0 : 5 - ceil_log2(mean);
      item.log_bags = static_cast<uint8_t>(std::min({wanted, spare, static_cast<int>(item.log_lanes)}));
    }
  }
  // Measured: many warps with few rows each serve best, long bags of wide rows best of all with one row each.
  launch<4, 1, 8>(scope, deep, fault, errors);
  launch<4, 2, 6>(scope, wide, fault, errors);
  launch<1, 2, 6>(scope, narrow, fault, errors);
}

}  // namespace sok::cuda
