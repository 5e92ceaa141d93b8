// SPDX-License-Identifier: Apache-2.0
// combine and gather_combine: rows picked by numbers and summed bag by bag.
// A group of threads takes some bags in a row and walks through all their entries at once, so that rows of several
// short bags are on their way together. Indices of the next rows are asked for before the present ones are added up.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/report.cuh"
#include "cuda/splits.cuh"
#include "cuda/stages.h"
#include "cuda/vector.cuh"
#include "sok/lookup.h"

namespace sok::cuda {
namespace {

// One batch of bags. Row i of it is rows + index[i] * stride, `dimension` elements; index[i] must be in [0, limit).
struct PoolItem {
  const void* rows;           // float32, float16 or bfloat16
  const void* index;          // int64 or int32
  const int64_t* row_splits;  // nullptr: each entry is a bag of its own
  const float* weights;       // nullptr: all 1
  float* output;              // [num_bags, dimension]; of members side by side, as Vectors has them
  int64_t output_stride;      // elements from a bag to the next
  int64_t limit;
  uint32_t num_entries;
  uint32_t num_bags;
  uint32_t dimension;
  uint32_t stride;
  uint32_t first_block;
  uint32_t batch;  // bags of each member; 0: there are none
  int32_t table;   // position in the call, for errors
  uint8_t combiner;
  bool index_64bit;
  uint8_t width;      // elements a thread
  bool deep;          // long bags of wide rows
  uint8_t log_lanes;  // 2^log_lanes threads share a row
  uint8_t log_bags;   // they take 2^log_bags bags, one after another
  uint8_t fault;      // Fault: what an index outside is
};

constexpr int kItems = 128;  // of a launch: parameters of 12 KB
constexpr int64_t kEnoughThreads = 132 * 2048;
constexpr uint32_t kRun = 32;  // entries that are added up one after another

struct PoolParameters {
  PoolItem items[kItems];
  uint32_t num_items;
  uint32_t num_blocks;
  sok_error_record* errors;
};

// Items mostly have equally many blocks, so the guess is right or nearly so.
__device__ __forceinline__ const PoolItem& item_of_block(const PoolParameters& p) {
  uint32_t i = static_cast<uint32_t>(static_cast<uint64_t>(blockIdx.x) * p.num_items / p.num_blocks);
  while (p.items[i].first_block > blockIdx.x) --i;
  while (i + 1 < p.num_items && p.items[i + 1].first_block <= blockIdx.x) ++i;
  return p.items[i];
}

// A sum of the columns, and one of the weights or of their squares.
template <int kWidth>
struct Sums {
  Vector<kWidth> columns;
  float weights;
};

template <int kWidth>
__device__ __forceinline__ Sums<kWidth> no_sums() {
  return {zeros<kWidth>(), 0.0f};
}

// The sums of a long bag's runs, and what rounding has added to them.
template <int kWidth>
struct RunSums {
  Sums<kWidth> sums, lost;
};

// `term` becomes the sum.
__device__ __forceinline__ void add_compensated(float& sum, float& lost, float& term, bool first) {
  const float old = first ? 0.0f : sum;
  const float rest = first ? term : term - lost;
  term = old + rest;
  // Infinite sums stay so: infinite minus infinite is not a number.
  lost = isfinite(term) ? (term - old) - rest : 0.0f;
  sum = term;
}

// Adds a run up: the error of 100,000 entries is that of one run (Kahan, Further remarks on reducing truncation errors,
// 1965). Few bags have more than one run, so this stays out of the loop over entries, and its sums out of registers.
template <int kWidth>
__device__ __noinline__ Sums<kWidth> add_run(RunSums<kWidth>& runs, bool first, Sums<kWidth> run) {
  auto& [sums, lost] = runs;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) add_compensated(sums.columns.v[i], lost.columns.v[i], run.columns.v[i], first);
  add_compensated(sums.weights, lost.weights, run.weights, first);
  return run;
}

// kInFlight: rows that a group asks for at once. kMembers: the vectors are those of members.
template <typename T, int kWidth, int kInFlight, int kBlocks, bool kMembers>
__global__ void __launch_bounds__(kThreads, kBlocks) pool_kernel(const __grid_constant__ PoolParameters p) {
  __shared__ uint32_t ends[kThreads + 1];
  const PoolItem& item = item_of_block(p);
  const uint32_t lanes = 1u << item.log_lanes;
  const uint32_t bags_of_block = (kThreads >> item.log_lanes) << item.log_bags;
  const uint32_t first_bag = (blockIdx.x - item.first_block) * bags_of_block;
  const uint32_t count = min(bags_of_block, item.num_bags - first_bag);
  if (!load_splits(item.row_splits, item.num_bags, item.num_entries, first_bag, count, item.table, ends, p.errors)) {
    return;
  }

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
    const T* const rows = static_cast<const T*>(item.rows) + column;
    float* output = item.output + static_cast<int64_t>(first_bag + begin_bag) * item.output_stride + column;
    uint32_t bag = begin_bag;
    Sums<kWidth> sum = no_sums<kWidth>();
    uint32_t bag_end = ends[bag + 1];
    uint32_t run_end = min(bag_end, begin + kRun);
    bool first_run = true;
    RunSums<kWidth> runs;

    // What to do at the end of a run; the last one of a bag finishes it.
    const auto finish_run = [&]() {
      const bool last_run = run_end == bag_end;
      if (!first_run || !last_run) {
        sum = add_run(runs, first_run, sum);
        first_run = last_run;
        if (!last_run) {
          sum = no_sums<kWidth>();
          run_end = min(bag_end, run_end + kRun);
          return;
        }
      }
      if (combiner != SOK_SUM) {
        const float divisor = combiner == SOK_MEAN ? sum.weights : sqrtf(sum.weights);
        const float factor = 1.0f / divisor;
#pragma unroll
        for (float& column : sum.columns.v) column = divisor == 0.0f ? 0.0f : column * factor;
      }
      if constexpr (kMembers) {
        const uint32_t number = first_bag + bag, member = number / item.batch;
        output = item.output + static_cast<int64_t>(number - member * item.batch) * item.output_stride +
                 static_cast<int64_t>(member) * dimension + column;
      }
      if (active) store_streaming(sum.columns, output);
      if constexpr (!kMembers) output += item.output_stride;
      ++bag;
      sum = no_sums<kWidth>();
      bag_end = ends[min(bag + 1, count)];
      run_end = min(bag_end, run_end + kRun);
    };

    int64_t next[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) next[k] = begin + k < end ? load_integer(item.index, is_64bit, begin + k) : 0;
    for (uint32_t entry = begin; entry < end; entry += kInFlight) {
      Piece<T, kWidth> row[kInFlight];
      float weight[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int64_t number = next[k];
        const bool inside = static_cast<uint64_t>(number) < static_cast<uint64_t>(limit);
        row[k] = {};
        if (entry + k < end) {
          if (!inside) wrong = entry + k;
          if (active && inside) row[k] = Piece<T, kWidth>::load_constant(rows + number * item.stride);
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
          while (entry + k >= run_end) finish_run();
          add_scaled(sum.columns, weight[k], row[k].wide());
          sum.weights += combiner == SOK_SQRTN ? weight[k] * weight[k] : weight[k];
        }
      }
    }
    while (bag < end_bag) finish_run();
  }
  if (wrong != UINT32_MAX) {
    report(p.errors, static_cast<Fault>(item.fault), item.table, load_integer(item.index, item.index_64bit, wrong),
           item.limit);
  }
}

int64_t blocks_of(const PoolItem& item) {
  const int64_t bags = (kThreads >> item.log_lanes) << item.log_bags;
  const int64_t blocks = ceil_div(item.num_bags, bags);
  return blocks == 0 && item.row_splits != nullptr ? 1 : blocks;  // row splits of no bags are checked too
}

template <typename T, int kWidth, int kInFlight, int kBlocks, bool kMembers>
void launch(const Scope& scope, const std::vector<PoolItem>& items, bool deep, sok_error_record* errors) {
  std::vector<const PoolItem*> mine;
  for (const PoolItem& item : items) {
    if (item.width == kWidth && item.deep == deep && (item.batch != 0) == kMembers) mine.push_back(&item);
  }
  for (size_t first = 0; first < mine.size(); first += kItems) {
    PoolParameters p;
    p.num_items = static_cast<uint32_t>(std::min<size_t>(kItems, mine.size() - first));
    p.errors = errors;
    int64_t blocks = 0;
    for (uint32_t i = 0; i < p.num_items; ++i) {
      p.items[i] = *mine[first + i];
      p.items[i].first_block = static_cast<uint32_t>(blocks);
      blocks += blocks_of(p.items[i]);
    }
    p.num_blocks = static_cast<uint32_t>(blocks);
    SOK_LAUNCH((pool_kernel<T, kWidth, kInFlight, kBlocks, kMembers>), blocks, scope.stream(), p);
  }
}

// Measured with float32: many warps with few rows each serve best, long bags of wide rows best of all with one row
// each.
template <typename T, bool kMembers>
void launch_all(const Scope& scope, const std::vector<PoolItem>& items, sok_error_record* errors) {
  constexpr int kWide = 16 / static_cast<int>(sizeof(T));
  launch<T, kWide, 1, kWide == 4 ? 8 : 6, kMembers>(scope, items, true, errors);
  launch<T, kWide, 2, kWide == 4 ? 6 : 5, kMembers>(scope, items, false, errors);
  if constexpr (kWide > 4) launch<T, 4, 2, 6, kMembers>(scope, items, false, errors);
  launch<T, 1, 2, 6, kMembers>(scope, items, false, errors);
}

PoolItem make_item(const Lookup& lookup, const RowSource& source) {
  const int64_t item_size = source.rows.item_size();
  PoolItem item = {};
  item.rows = source.rows.data;
  item.index = source.numbers.data;
  item.index_64bit = source.numbers.is_64bit;
  item.row_splits = lookup.row_splits;
  item.weights = lookup.weights;
  item.output = lookup.output.data;
  item.output_stride = lookup.output.stride;
  item.batch = static_cast<uint32_t>(lookup.output.batch);
  item.limit = source.limit;
  item.num_entries = static_cast<uint32_t>(lookup.keys.size);
  item.num_bags = static_cast<uint32_t>(lookup.num_bags);
  item.dimension = static_cast<uint32_t>(lookup.id.dimension);
  item.stride = static_cast<uint32_t>(source.stride);
  item.table = lookup.id.number;
  item.combiner = static_cast<uint8_t>(lookup.combiner);
  item.fault = static_cast<uint8_t>(source.fault);
  const bool aligned = is_aligned(item.rows) && is_aligned(item.output) && item.output_stride % 4 == 0;
  item.width = static_cast<uint8_t>(width_of_rows(item.dimension, source.multiple, item_size, aligned));
  item.log_lanes = static_cast<uint8_t>(log_lanes_of(item.dimension, item.width));
  item.deep = item.width * item_size == 16 && item.num_entries / 4 >= item.num_bags && item.log_lanes >= 3;
  return item;
}

}  // namespace

void pool(const sok_context& context, const std::vector<Lookup>& lookups, const std::vector<RowSource>& sources) {
  const Scope scope(context);
  const Report report(scope);
  std::vector<PoolItem> of_dtype[3];
  int64_t threads = 0;
  for (size_t i = 0; i < lookups.size(); ++i) {
    const Lookup& lookup = lookups[i];
    if (lookup.num_bags == 0 && lookup.row_splits == nullptr) continue;
    const PoolItem item = make_item(lookup, sources[i]);
    threads += lookup.num_bags << item.log_lanes;
    const sok_dtype dtype = sources[i].rows.dtype;
    of_dtype[dtype == SOK_FLOAT32 ? 0 : dtype == SOK_FLOAT16 ? 1 : 2].push_back(item);
  }
  // As many bags a group as make about 32 entries, as long as every multiprocessor stays busy.
  const int spare = static_cast<int>(std::max<int64_t>(0, ceil_log2(threads / kEnoughThreads + 1) - 1));
  for (std::vector<PoolItem>& items : of_dtype) {
    for (PoolItem& item : items) {
      const int64_t mean = std::max<int64_t>(1, item.num_entries / std::max<uint32_t>(1, item.num_bags));
      const int wanted = mean >= 32 ? 0 : 5 - ceil_log2(mean);
      item.log_bags = static_cast<uint8_t>(std::min({wanted, spare, static_cast<int>(item.log_lanes)}));
    }
  }
  launch_all<float, false>(scope, of_dtype[0], report.errors());
  launch_all<float, true>(scope, of_dtype[0], report.errors());
  launch_all<__half, false>(scope, of_dtype[1], report.errors());
  launch_all<__half, true>(scope, of_dtype[1], report.errors());
  launch_all<__nv_bfloat16, false>(scope, of_dtype[2], report.errors());
  launch_all<__nv_bfloat16, true>(scope, of_dtype[2], report.errors());
  report.finish(lookups);
}

}  // namespace sok::cuda
