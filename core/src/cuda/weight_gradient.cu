// SPDX-License-Identifier: Apache-2.0
// weight_gradient: a group of threads takes a bag, multiplies its rows with the output gradient, then corrects for the
// divisor.
#include <map>
#include <type_traits>
#include <utility>

#include "cuda/launch.h"
#include "cuda/report.cuh"
#include "cuda/splits.cuh"
#include "cuda/stages.h"
#include "cuda/upload.h"
#include "cuda/vector.cuh"

namespace sok::cuda {
namespace {

struct Item {
  const void* rows;  // float32, float16 or bfloat16
  const void* index;
  const int64_t* row_splits;
  const float* weights;
  Vectors gradient;  // data nullptr: zeros
  float* result;
  int64_t limit;
  int64_t stride;
  uint32_t num_entries;
  uint32_t num_bags;
  uint32_t dimension;
  uint32_t first_block;
  int32_t table;
  uint8_t combiner;
  bool index_64bit;
  uint8_t log_lanes;
  uint8_t fault;  // Fault: what an index outside is
};

template <typename T, int kWidth>
__device__ __forceinline__ float dot(const T* a, const float* b, uint32_t dimension, uint32_t lane, uint32_t lanes) {
  float total = 0.0f;
  for (uint32_t column = lane * kWidth; column < dimension; column += lanes * kWidth) {
    const Vector<kWidth> x = Piece<T, kWidth>::load_constant(a + column).wide();
    const Vector<kWidth> y = load_constant<kWidth>(b + column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) total = fmaf(x.v[i], y.v[i], total);
  }
  return total;
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, 8)
    weight_gradient_kernel(const Item* items, uint32_t num_items, sok_error_record* errors) {
  __shared__ uint32_t ends[kThreads + 1];
  uint32_t low = 0, high = num_items - 1;
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (__ldg(&items[middle].first_block) <= blockIdx.x) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const Item& item = items[low];
  const uint32_t bags = kThreads >> item.log_lanes;
  const uint32_t first = (blockIdx.x - item.first_block) * bags;
  const uint32_t count = min(bags, item.num_bags - first);
  if (!load_splits(item.row_splits, item.num_bags, item.num_entries, first, count, item.table, ends, errors)) {
    return;
  }
  const uint32_t at = threadIdx.x >> item.log_lanes;
  if (at >= count) return;
  const uint32_t lanes = 1u << item.log_lanes, lane = threadIdx.x & (lanes - 1);
  const unsigned mask = group_mask(item.log_lanes);
  const uint32_t begin = ends[at], end = ends[at + 1];
  if (item.gradient.data == nullptr) {
    for (uint32_t i = begin + lane; i < end; i += lanes) item.result[i] = 0.0f;
    return;
  }
  const float* const gradient = item.gradient.at(first + at);
  float weighted = 0.0f, total = 0.0f;  // sum of w d, and of w or its squares
  uint32_t wrong = UINT32_MAX;
  for (uint32_t i = begin; i < end; ++i) {
    const int64_t number = load_integer(item.index, item.index_64bit, i);
    float part = 0.0f;
    if (static_cast<uint64_t>(number) < static_cast<uint64_t>(item.limit)) {
      part = dot<T, kWidth>(static_cast<const T*>(item.rows) + number * item.stride, gradient, item.dimension, lane,
                            lanes);
    } else {
      wrong = i;
    }
    const float d = group_sum(part, item.log_lanes, mask);
    const float w = __ldg(item.weights + i);
    weighted = fmaf(w, d, weighted);
    total += item.combiner == SOK_SQRTN ? w * w : w;
    if (lane == 0) item.result[i] = d;
  }
  if (lane != 0) return;
  if (wrong != UINT32_MAX) {
    report(errors, static_cast<Fault>(item.fault), item.table, load_integer(item.index, item.index_64bit, wrong),
           item.limit);
    return;
  }
  if (item.combiner == SOK_SUM) return;
  const float divisor = item.combiner == SOK_MEAN ? total : sqrtf(total);
  const float share = divisor == 0.0f ? 0.0f : weighted / divisor;
  for (uint32_t i = begin; i < end; ++i) {
    const float pull = item.combiner == SOK_MEAN ? share : __ldg(item.weights + i) / divisor * share;
    item.result[i] = divisor == 0.0f ? 0.0f : (item.result[i] - pull) / divisor;
  }
}

template <typename T, int kWidth>
void launch(const Scope& scope, std::vector<Item>& items, sok_error_record* errors) {
  if (items.empty()) return;
  int64_t blocks = 0;
  for (Item& item : items) {
    item.first_block = static_cast<uint32_t>(blocks);
    blocks += std::max<int64_t>(1, ceil_div(item.num_bags, kThreads >> item.log_lanes));
  }
  Upload upload;
  const size_t place = upload.add(items);
  upload.send(scope);
  SOK_LAUNCH((weight_gradient_kernel<T, kWidth>), blocks, scope.stream(), upload.at<Item>(place),
             static_cast<uint32_t>(items.size()), errors);
}

}  // namespace

void weight_gradient(const sok_context& context, const std::vector<Lookup>& lookups,
                     const std::vector<RowSource>& sources, const std::vector<Vectors>& output_gradients,
                     const std::vector<float*>& weight_gradients) {
  const Scope scope(context);
  const Report report(scope);
  std::map<sok_dtype, std::pair<std::vector<Item>, std::vector<Item>>> kinds;  // of wide accesses, of narrow ones
  for (size_t i = 0; i < lookups.size(); ++i) {
    const Lookup& lookup = lookups[i];
    const RowSource& source = sources[i];
    if (weight_gradients[i] == nullptr) continue;
    Item item = {};
    item.rows = source.rows.data;
    item.index = source.numbers.data;
    item.index_64bit = source.numbers.is_64bit;
    item.row_splits = lookup.row_splits;
    item.weights = lookup.weights;
    item.gradient = output_gradients[i];
    item.result = weight_gradients[i];
    item.limit = source.limit;
    item.stride = source.stride;
    item.num_entries = static_cast<uint32_t>(lookup.keys.size);
    item.num_bags = static_cast<uint32_t>(lookup.num_bags);
    item.dimension = static_cast<uint32_t>(lookup.id.dimension);
    item.table = lookup.id.number;
    item.combiner = static_cast<uint8_t>(lookup.combiner);
    item.fault = static_cast<uint8_t>(source.fault);
    const bool aligned = is_aligned(item.rows) && is_aligned(item.gradient.data) && item.gradient.stride % 4 == 0 &&
                         source.multiple % 4 == 0;
    const int width = width_of(lookup.id.dimension, aligned);
    item.log_lanes = static_cast<uint8_t>(log_lanes_of(lookup.id.dimension, width));
    auto& [wide, narrow] = kinds[source.rows.dtype];
    (width == 4 ? wide : narrow).push_back(item);
  }
  for (auto& [dtype, items] : kinds) {
    with_element(dtype, [&, &items = items](auto* element) {
      using T = std::remove_pointer_t<decltype(element)>;
      launch<T, 4>(scope, items.first, report.errors());
      launch<T, 1>(scope, items.second, report.errors());
    });
  }
  report.finish(lookups);
}

}  // namespace sok::cuda
