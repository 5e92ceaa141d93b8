// SPDX-License-Identifier: Apache-2.0
// Rows -> one vector a bag: the loop of gather, combine and gather_combine; and the gradient of the weights.
#ifndef SOK_CPU_KERNELS_POOL_H_
#define SOK_CPU_KERNELS_POOL_H_

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vector.h"
#include "sok/lookup.h"

namespace sok::cpu::SOK_ISA {
namespace {

template <typename Index>
int64_t find_outside_of(const Index* index, int64_t begin, int64_t end, uint64_t limit) {
  constexpr int64_t kStep = 256;  // long enough to vectorise, short enough to stop early
  for (int64_t first = begin; first < end; first += kStep) {
    const int64_t last = end - first < kStep ? end : first + kStep;
    uint64_t outside = 0;
    for (int64_t i = first; i < last; ++i) outside |= static_cast<uint64_t>(static_cast<int64_t>(index[i])) >= limit;
    if (outside == 0) continue;
    for (int64_t i = first; i < last; ++i) {
      if (static_cast<uint64_t>(static_cast<int64_t>(index[i])) >= limit) return i;
    }
  }
  return -1;
}

int64_t find_outside(const void* index, bool is_64bit, int64_t begin, int64_t end, uint64_t limit) {
  return is_64bit ? find_outside_of(static_cast<const int64_t*>(index), begin, end, limit)
                  : find_outside_of(static_cast<const int32_t*>(index), begin, end, limit);
}

int64_t find_bad_split(const int64_t* row_splits, int64_t begin, int64_t end, int64_t limit) {
  for (int64_t b = begin; b < end; ++b) {
    if (!(0 <= row_splits[b] && row_splits[b] <= row_splits[b + 1] && row_splits[b + 1] <= limit)) return b;
  }
  return -1;
}

// Of weights [begin, end), at least one, or of their squares.
template <bool kSquared>
SOK_INLINE float sum_of_weights(const float* weights, int64_t begin, int64_t end) {
  const auto load = [=](auto& sum, int64_t i) __attribute__((always_inline)) {
    kSquared ? sum.load_scaled(weights + i, weights[i]) : sum.load(weights + i);
  };
  const auto add = [=](auto& sum, int64_t i) __attribute__((always_inline)) {
    kSquared ? sum.add_scaled(weights + i, weights[i]) : sum.add(weights + i);
  };
  Tile<1> sum;
  sum_entries(sum, begin, end, load, add);
  float result;
  sum.store(&result);
  return result;
}

// What the sum of entries [begin, end) is divided by; 0: the bag's vector is zeros.
SOK_INLINE float bag_divisor(int32_t combiner, const float* weights, int64_t begin, int64_t end) {
  if (begin == end) return 0.0f;
  if (combiner == SOK_SUM) return 1.0f;
  const float count = static_cast<float>(end - begin);
  if (combiner == SOK_MEAN) {
    if (weights == nullptr) return count;
    return sum_of_weights<false>(weights, begin, end);
  }
  if (weights == nullptr) return __builtin_sqrtf(count);
  return __builtin_sqrtf(sum_of_weights<true>(weights, begin, end));
}

void bag_scales(const int64_t* row_splits, const float* weights, int32_t combiner, int64_t begin, int64_t end,
                float* scales) {
  for (int64_t bag = begin; bag < end; ++bag) {
    const int64_t first = row_splits != nullptr ? row_splits[bag] : bag;
    const int64_t last = row_splits != nullptr ? row_splits[bag + 1] : bag + 1;
    const float divisor = bag_divisor(combiner, weights, first, last);
    if (weights == nullptr) {
      scales[bag] = divisor == 0.0f ? 0.0f : 1.0f / divisor;
    } else {
      for (int64_t i = first; i < last; ++i) scales[i] = divisor == 0.0f ? 0.0f : weights[i] / divisor;
    }
  }
}

template <typename Index, typename Element>
struct RowReader {
  explicit RowReader(const IndexedRows& source, int64_t dimension)
      : rows(static_cast<const Element*>(source.rows)),
        stride(source.stride),
        index(static_cast<const Index*>(source.index)),
        row_bytes(dimension * static_cast<int64_t>(sizeof(Element))) {}
  SOK_INLINE const Element* operator()(int64_t i) const { return rows + static_cast<int64_t>(index[i]) * stride; }
  SOK_INLINE void prefetch(int64_t i) const {
    prefetch_row(reinterpret_cast<uintptr_t>(rows) + static_cast<uintptr_t>(static_cast<int64_t>(index[i])) *
                                                         sizeof(Element) * static_cast<uintptr_t>(stride),
                 row_bytes);
  }
  const Element* rows;
  int64_t stride;
  const Index* index;
  int64_t row_bytes;
};

// Calls f with a null pointer to the type of the numbers, and one to that of the rows' elements.
template <typename Index, typename F>
SOK_INLINE void with_element(sok_dtype dtype, F f) {
  const Index* const index = nullptr;
  switch (dtype) {
    case SOK_FLOAT16:
      return f(index, static_cast<const Float16*>(nullptr));
    case SOK_BFLOAT16:
      return f(index, static_cast<const BFloat16*>(nullptr));
    default:
      return f(index, static_cast<const float*>(nullptr));
  }
}
template <typename F>
SOK_INLINE void with_types(const IndexedRows& rows, F f) {
  rows.index_64bit ? with_element<int64_t>(rows.dtype, f) : with_element<int32_t>(rows.dtype, f);
}

template <bool kWeighted, typename Index, typename Element>
void pool_bags(const Index*, const Element*, const PoolTask& task, int64_t begin, int64_t end) {
  const RowReader<Index, Element> row(task.source, task.dimension);
  const int64_t* const splits = task.row_splits;
  const float* const weights = task.weights;
  const int64_t dimension = task.dimension;
  const int64_t stop = splits != nullptr ? splits[end] : end;
  const int64_t ahead = rows_ahead(row.row_bytes);
  int64_t first = splits != nullptr ? splits[begin] : begin;
  for (int64_t i = first; i < stop && i < first + ahead; ++i) row.prefetch(i);
  for (int64_t bag = begin; bag < end; ++bag) {
    const int64_t last = splits != nullptr ? splits[bag + 1] : bag + 1;
    float* const output = task.output + bag * task.output_stride;
    const float divisor = bag_divisor(task.combiner, kWeighted ? weights : nullptr, first, last);
    if (divisor == 0.0f) {
      zero_row(output, dimension);
      for (; first < last; ++first) {
        if (first + ahead < stop) row.prefetch(first + ahead);
      }
      continue;
    }
    if (first + ahead < stop) row.prefetch(first + ahead);
    for_columns(dimension, 0, [&](auto tile, int64_t column) __attribute__((always_inline)) {
      const int64_t prefetch_stop = column == 0 ? stop - ahead : 0;
      const auto load = [&](auto& sum, int64_t i) __attribute__((always_inline)) {
        if (i != first && i < prefetch_stop) row.prefetch(i + ahead);
        kWeighted ? sum.load_scaled(row(i) + column, weights[i]) : sum.load(row(i) + column);
      };
      const auto add = [&](auto& sum, int64_t i) __attribute__((always_inline)) {
        if (i < prefetch_stop) row.prefetch(i + ahead);
        kWeighted ? sum.add_scaled(row(i) + column, weights[i]) : sum.add(row(i) + column);
      };
      sum_entries(tile, first, last, load, add);
      if (divisor != 1.0f) tile.divide(divisor);
      tile.store(output + column);
    });
    first = last;
  }
}

void pool(const PoolTask& task, int64_t begin, int64_t end) {
  with_types(task.source, [&](auto index, auto element) {
    task.weights != nullptr ? pool_bags<true>(index, element, task, begin, end)
                            : pool_bags<false>(index, element, task, begin, end);
  });
}

template <int N>
SOK_INLINE float sum_pairs(const float* lanes) {
  if constexpr (N == 1) {
    return lanes[0];
  } else {
    return sum_pairs<N / 2>(lanes) + sum_pairs<N / 2>(lanes + N / 2);
  }
}

// Sums lane by lane, then the lanes in pairs: the order is fixed by the dimension alone.
template <typename Element>
SOK_INLINE float dot(const float* a, const Element* b, int64_t dimension) {
  int64_t column = 0;
  float total = 0.0f;
  if (dimension >= kLanes) {
    constexpr int kBlock = 4 * kLanes;
    Tile<kLanes> sum;
    sum.zero();
    if (dimension >= kBlock) {
      Tile<kBlock> sums;
      sums.zero();
      for (; column + kBlock <= dimension; column += kBlock) sums.add_product(a + column, b + column);
      sum.v[0] = (sums.v[0] + sums.v[1]) + (sums.v[2] + sums.v[3]);
    }
    for (; column + kLanes <= dimension; column += kLanes) sum.add_product(a + column, b + column);
    float lanes[kLanes];
    sum.store(lanes);
    total = sum_pairs<kLanes>(lanes);
  }
  for (; column < dimension; ++column) total += a[column] * read<1>(b + column);
  return total;
}

template <typename Index, typename Element>
void weight_gradient_bags(const Index*, const Element*, const WeightGradientTask& task, int64_t begin, int64_t end) {
  const RowReader<Index, Element> row(task.source, task.dimension);
  const int64_t* const splits = task.row_splits;
  const float* const weights = task.weights;
  float* const result = task.weight_gradient;
  const int64_t stop = splits != nullptr ? splits[end] : end;
  const int64_t ahead = rows_ahead(row.row_bytes);
  int64_t first = splits != nullptr ? splits[begin] : begin;
  for (int64_t bag = begin; bag < end; ++bag) {
    const int64_t last = splits != nullptr ? splits[bag + 1] : bag + 1;
    const float* const gradient = task.output_gradient + bag * task.gradient_stride;
    float weighted = 0.0f;
    for (int64_t i = first; i < last; ++i) {
      if (i + ahead < stop) row.prefetch(i + ahead);
      result[i] = dot(gradient, row(i), task.dimension);
      weighted += weights[i] * result[i];
    }
    if (task.combiner != SOK_SUM) {
      const float divisor = bag_divisor(task.combiner, weights, first, last);
      const float share = divisor == 0.0f ? 0.0f : weighted / divisor;
      for (int64_t i = first; i < last; ++i) {
        const float pull = task.combiner == SOK_MEAN ? share : weights[i] / divisor * share;
        result[i] = divisor == 0.0f ? 0.0f : (result[i] - pull) / divisor;
      }
    }
    first = last;
  }
}

void weight_gradient(const WeightGradientTask& task, int64_t begin, int64_t end) {
  with_types(task.source, [&](auto index, auto element) { weight_gradient_bags(index, element, task, begin, end); });
}

}  // namespace
}  // namespace sok::cpu::SOK_ISA

#endif  // SOK_CPU_KERNELS_POOL_H_
