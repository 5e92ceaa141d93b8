// SPDX-License-Identifier: Apache-2.0
// Tiles of columns in registers, through GCC's vector extensions. Included by kernels.cc only.
#ifndef SOK_CPU_KERNELS_VECTOR_H_
#define SOK_CPU_KERNELS_VECTOR_H_

#include <stdint.h>

#include "cpu/kernels/elements.h"

namespace sok::cpu::SOK_ISA {
namespace {

// kLanes: floats of a register. kMaxBlock: columns that one pass over a bag accumulates, half the registers.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kMaxBlock = 256;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kMaxBlock = 64;
#else
constexpr int kLanes = 4, kMaxBlock = 32;
#endif

template <int... I>
struct Sequence {};
template <int N, int... I>
struct MakeSequence : MakeSequence<N - 1, N - 1, I...> {};
template <int... I>
struct MakeSequence<0, I...> {
  using type = Sequence<I...>;
};

// N columns, N a power of two. Loops over registers are fold expressions, which the compiler cannot fail to unroll.
template <int N>
struct Tile {
  static constexpr int kWidth = N < kLanes ? N : kLanes;
  static constexpr int kCount = N / kWidth;
  using V = typename Vector<kWidth>::type;
  using All = typename MakeSequence<kCount>::type;

  V v[kCount];

  template <typename Element>
  static SOK_INLINE V get(const Element* p, int i) {
    return read<kWidth>(p + i * kWidth);
  }

  SOK_INLINE void zero() { zero(All()); }
  template <typename Element>
  SOK_INLINE void load(const Element* p) {
    load(p, All());
  }
  template <typename Element>
  SOK_INLINE void load_scaled(const Element* p, float s) {
    load_scaled(p, s, All());
  }
  template <typename Element>
  SOK_INLINE void add(const Element* p) {
    add(p, All());
  }
  template <typename Element>
  SOK_INLINE void add_scaled(const Element* p, float s) {
    add_scaled(p, s, All());
  }
  template <typename Element>
  SOK_INLINE void add_product(const float* p, const Element* q) {
    add_product(p, q, All());
  }
  SOK_INLINE void add(const Tile& other) { add(other, All()); }
  SOK_INLINE void divide(float s) { divide(s, All()); }
  template <typename Element>
  SOK_INLINE void store(Element* p) const {
    store(p, All());
  }

 private:
  template <int... I>
  SOK_INLINE void zero(Sequence<I...>) {
    ((v[I] = V{}), ...);
  }
  template <typename Element, int... I>
  SOK_INLINE void load(const Element* p, Sequence<I...>) {
    ((v[I] = get(p, I)), ...);
  }
  template <typename Element, int... I>
  SOK_INLINE void load_scaled(const Element* p, float s, Sequence<I...>) {
    ((v[I] = get(p, I) * s), ...);
  }
  template <typename Element, int... I>
  SOK_INLINE void add(const Element* p, Sequence<I...>) {
    ((v[I] += get(p, I)), ...);
  }
  template <int... I>
  SOK_INLINE void add(const Tile& other, Sequence<I...>) {
    ((v[I] += other.v[I]), ...);
  }
  template <typename Element, int... I>
  SOK_INLINE void add_scaled(const Element* p, float s, Sequence<I...>) {
    ((v[I] += get(p, I) * s), ...);
  }
  template <typename Element, int... I>
  SOK_INLINE void add_product(const float* p, const Element* q, Sequence<I...>) {
    ((v[I] += get(p, I) * get(q, I)), ...);
  }
  template <int... I>
  SOK_INLINE void divide(float s, Sequence<I...>) {
    ((v[I] /= s), ...);
  }
  template <typename Element, int... I>
  SOK_INLINE void store(Element* p, Sequence<I...>) const {
    (write<kWidth>(v[I], p + I * kWidth), ...);
  }
};

// How many entries are added up one after the other.
constexpr int64_t kRun = 16;

// The sum of entries [first, last), at least one: `load(tile, i)` sets it to entry i, `add(tile, i)` adds entry i.
// Runs of kRun entries are added up pairwise (Higham, The accuracy of floating point summation, 1993): the error of a
// row with a million entries is that of some 35 additions, not of a million.
template <int N, typename Load, typename Add>
SOK_INLINE void sum_entries(Tile<N>& tile, int64_t first, int64_t last, Load load, Add add) {
  const auto sum_run = [&](int64_t begin, int64_t end) __attribute__((always_inline)) {
    load(tile, begin);
    for (int64_t i = begin + 1; i < end; ++i) add(tile, i);
  };
  if (last - first <= kRun) {
    sum_run(first, last);
    return;
  }
  // sums[k]: of 2^k runs, where the number of runs so far has bit k. No address space holds 2^44 runs.
  Tile<N> sums[44];
  int64_t num_runs = 0;
  for (int64_t begin = first; begin < last; begin += kRun) {
    sum_run(begin, last - begin < kRun ? last : begin + kRun);
    int level = 0;
    for (int64_t runs = num_runs++; runs % 2 == 1; runs /= 2) tile.add(sums[level++]);
    sums[level] = tile;
  }
  tile.zero();
  int level = 0;
  for (int64_t runs = num_runs; runs > 0; runs /= 2, ++level) {
    if (runs % 2 == 1) tile.add(sums[level]);
  }
}

// Calls f(Tile<N>, column) until all columns are covered, the widest tiles first.
template <int N = kMaxBlock, typename F>
SOK_INLINE void for_columns(int64_t dimension, int64_t column, F f) {
  if constexpr (N == kMaxBlock) {
    for (; dimension - column >= N; column += N) f(Tile<N>(), column);
  } else if (dimension - column >= N) {
    f(Tile<N>(), column);
    column += N;
  }
  if constexpr (N > 1) {
    if (column != dimension) for_columns<N / 2>(dimension, column, f);
  }
}

__attribute__((noinline, unused)) void zero_row(float* row, int64_t dimension) {
  for_columns(dimension, 0, [=](auto tile, int64_t column) __attribute__((always_inline)) {
    tile.zero();
    tile.store(row + column);
  });
}

template <typename From, typename To>
__attribute__((noinline)) void copy_row(const From* from, To* to, int64_t dimension) {
  for_columns(dimension, 0, [=](auto tile, int64_t column) __attribute__((always_inline)) {
    tile.load(from + column);
    tile.store(to + column);
  });
}

// Rows are asked for ahead of their use: tables are far larger than caches. About kBytesAhead are on their way, to the
// second-level cache: it waits for more lines at once than the first-level one can.
constexpr int64_t kBytesAhead = 16384;
constexpr int64_t kMaxRowsAhead = 64;
constexpr int64_t kMaxPrefetchedBytes = 1024;  // of one row; the processor's own prefetcher sees the rest coming

SOK_INLINE int64_t rows_ahead(int64_t row_bytes) {
  const int64_t rows = kBytesAhead / row_bytes;
  return rows < 2 ? 2 : rows > kMaxRowsAhead ? kMaxRowsAhead : rows;
}

// `address` need not be valid, so it is a number: arithmetic on a pointer would have to stay within its array.
SOK_INLINE void prefetch_row(uintptr_t address, int64_t bytes) {
  if (bytes > kMaxPrefetchedBytes) bytes = kMaxPrefetchedBytes;
  const uintptr_t end = address + static_cast<uintptr_t>(bytes);
  for (uintptr_t line = address & ~static_cast<uintptr_t>(63); line < end; line += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(line), 0, 2);  // NOLINT(performance-no-int-to-ptr): see above
  }
}

}  // namespace
}  // namespace sok::cpu::SOK_ISA

#endif  // SOK_CPU_KERNELS_VECTOR_H_
