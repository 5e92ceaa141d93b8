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
__attribute__((noinline)) void sum_entries(const SegmentReader& reader, int64_t first, int64_t last, float* output) {
  const int64_t dimension = reader.segments.dimension, ahead = reader.ahead;
  const float* const scales = reader.segments.scales;
  const int64_t p = reader.number(first);
  const float* const row = reader.row(p);
  for_columns(dimension, 0, [&](auto block, int64_t column) __attribute__((always_inline)) {
    if (kScaled) {
      block.load_scaled(row + column, scales[p]);
    } else {
      block.load(row + column);
    }
    for (int64_t i = first + 1; i < last; ++i) {
      if (column == 0) reader.prefetch(i + ahead);
      const int64_t q = reader.number(i);
      if (kScaled) {
        block.add_scaled(reader.row(q) + column, scales[q]);
      } else {
        block.add(reader.row(q) + column);
      }
    }
    block.store(output + column);
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
    sum_entries<true>(reader, first, last, output);
  } else if (kMayAlias && last - first == 1) {
    return reader.row(reader.number(first));
  } else {
    sum_entries<false>(reader, first, last, output);
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
