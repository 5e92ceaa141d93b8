// SPDX-License-Identifier: Apache-2.0
// Sums of gradient rows, segment by segment: the loop of spread, reduce and apply.
#ifndef SOK_CPU_KERNELS_SEGMENTS_H_
#define SOK_CPU_KERNELS_SEGMENTS_H_

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vector.h"

namespace sok::cpu::SOK_ISA {
namespace {

template <bool kPointers, bool kScaled>
struct SegmentReader {
  explicit SegmentReader(const Segments& from, int64_t end)
      : segments(from), stop(begin_of(end)), ahead(rows_ahead(from.dimension)) {}

  SOK_INLINE int64_t begin_of(int64_t u) const { return segments.splits != nullptr ? segments.splits[u] : u; }
  SOK_INLINE int64_t number(int64_t i) const { return segments.order != nullptr ? segments.order[i] : i; }
  SOK_INLINE const float* row(int64_t p) const {
    return kPointers ? segments.rows[p] : segments.base + p * segments.dimension;
  }
  SOK_INLINE void prefetch(int64_t i) const {
    if (i < stop) prefetch_row<false>(reinterpret_cast<uintptr_t>(row(number(i))), segments.dimension);
  }

  // The sum of segment u: written to `output`, or a row of the source itself when `may_alias` and nothing is to be added.
  SOK_INLINE const float* sum(int64_t u, float* output, bool may_alias) const {
    const int64_t first = begin_of(u);
    const int64_t last = segments.splits != nullptr ? segments.splits[u + 1] : u + 1;
    if (first == last) {
      zero_row(output, segments.dimension);
      return output;
    }
    const int64_t p = number(first);
    if (!kScaled && may_alias && last - first == 1) {
      prefetch(first + ahead);
      return row(p);
    }
    for_columns(segments.dimension, 0, [&](auto block, int64_t column) __attribute__((always_inline)) {
      if (column == 0) prefetch(first + ahead);
      if (kScaled) {
        block.load_scaled(row(p) + column, segments.scales[p]);
      } else {
        block.load(row(p) + column);
      }
      for (int64_t i = first + 1; i < last; ++i) {
        if (column == 0) prefetch(i + ahead);
        const int64_t q = number(i);
        if (kScaled) {
          block.add_scaled(row(q) + column, segments.scales[q]);
        } else {
          block.add(row(q) + column);
        }
      }
      block.store(output + column);
    });
    return output;
  }

  const Segments& segments;
  const int64_t stop, ahead;
};

// Calls f with the reader that fits.
template <typename F>
SOK_INLINE void with_reader(const Segments& segments, int64_t end, F f) {
  if (segments.rows != nullptr) {
    segments.scales != nullptr ? f(SegmentReader<true, true>(segments, end))
                               : f(SegmentReader<true, false>(segments, end));
  } else {
    segments.scales != nullptr ? f(SegmentReader<false, true>(segments, end))
                               : f(SegmentReader<false, false>(segments, end));
  }
}

void sum_segments(const Segments& segments, int64_t begin, int64_t end, float* output) {
  with_reader(segments, end, [=](const auto& reader) {
    for (int64_t u = begin; u < end; ++u) reader.sum(u, output + (u - begin) * reader.segments.dimension, false);
  });
}

}  // namespace
}  // namespace sok::cpu::SOK_ISA

#endif  // SOK_CPU_KERNELS_SEGMENTS_H_
