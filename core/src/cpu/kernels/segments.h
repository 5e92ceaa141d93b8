// SPDX-License-Identifier: Apache-2.0
// Sums of gradient rows, segment by segment: the loop of spread, reduce and apply.
#ifndef SOK_CPU_KERNELS_SEGMENTS_H_
#define SOK_CPU_KERNELS_SEGMENTS_H_

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vector.h"

namespace sok::cpu::SOK_ISA {
namespace {

// Entries of the segments of one call.
struct SegmentReader {
  SegmentReader(const Segments& from, int64_t end_segment)
      : segments(from), stop(begin_of(end_segment)), ahead(rows_ahead(4 * from.dimension)) {}

  SOK_INLINE int64_t begin_of(int64_t u) const { return segments.splits != nullptr ? segments.splits[u] : u; }
  SOK_INLINE int64_t number(int64_t i) const { return segments.order != nullptr ? segments.order[i] : i; }
  SOK_INLINE const float* row(int64_t p) const {
    return segments.rows != nullptr ? segments.rows[p] : segments.base + p * segments.stride;
  }
  SOK_INLINE void prefetch(int64_t i) const {
    if (i < stop) prefetch_row(reinterpret_cast<uintptr_t>(row(number(i))), 4 * segments.dimension);
  }

  const Segments segments;
  const int64_t stop, ahead;
};

// The sum of entries [first, last), at least one, to `output`. Their rows are on their way; those that come `ahead` of
// the others are asked for.
template <bool kScaled>
__attribute__((noinline)) void sum_rows(const SegmentReader& reader, int64_t first, int64_t last, float* output) {
  const int64_t dimension = reader.segments.dimension, ahead = reader.ahead;
  const float* const scales = reader.segments.scales;
  for_columns(dimension, 0, [&](auto tile, int64_t column) __attribute__((always_inline)) {
    const auto number = [&](int64_t i) __attribute__((always_inline)) {
      if (column == 0 && i != first) reader.prefetch(i + ahead);
      return reader.number(i);
    };
    const auto load = [&](auto& sum, int64_t i) __attribute__((always_inline)) {
      const int64_t p = number(i);
      kScaled ? sum.load_scaled(reader.row(p) + column, scales[p]) : sum.load(reader.row(p) + column);
    };
    const auto add = [&](auto& sum, int64_t i) __attribute__((always_inline)) {
      const int64_t p = number(i);
      kScaled ? sum.add_scaled(reader.row(p) + column, scales[p]) : sum.add(reader.row(p) + column);
    };
    sum_entries(tile, first, last, load, add);
    tile.store(output + column);
  });
}

// The sum of segment u: written to `output`, or a row of the source itself where nothing is to be added.
template <bool kMayAlias>
SOK_INLINE const float* sum_segment(const SegmentReader& reader, int64_t u, float* output) {
  const int64_t first = reader.begin_of(u);
  const int64_t last = reader.segments.splits != nullptr ? reader.segments.splits[u + 1] : u + 1;
  if (first == last) {
    zero_row(output, reader.segments.dimension);
    return output;
  }
  reader.prefetch(first + reader.ahead);
  if (reader.segments.scales != nullptr) {
    sum_rows<true>(reader, first, last, output);
  } else if (kMayAlias && last - first == 1) {
    return reader.row(reader.number(first));
  } else {
    sum_rows<false>(reader, first, last, output);
  }
  return output;
}

void sum_segments(const Segments& segments, int64_t begin, int64_t end, float* output) {
  const SegmentReader reader(segments, end);
  for (int64_t u = begin; u < end; ++u) sum_segment<false>(reader, u, output + (u - begin) * segments.dimension);
}

}  // namespace
}  // namespace sok::cpu::SOK_ISA

#endif  // SOK_CPU_KERNELS_SEGMENTS_H_
