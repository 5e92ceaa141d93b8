// SPDX-License-Identifier: Apache-2.0
// Numbers of a row in registers: float32 there, float32, float16 or bfloat16 in memory. Included by vector.h only.
//
// read<N> widens exactly; write<N> rounds to nearest, ties to even. Too large numbers become infinities, NaN stays NaN.
// Neither depends on whether the thread flushes subnormal float32 numbers to zero.
#ifndef SOK_CPU_KERNELS_ELEMENTS_H_
#define SOK_CPU_KERNELS_ELEMENTS_H_

#include <stdint.h>
#include <string.h>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "cpu/kernels/kernels.h"

#define SOK_INLINE inline __attribute__((always_inline))

namespace sok::cpu::SOK_ISA {
namespace {

#ifdef __AVX512F__
constexpr __mmask16 kAll = 0xffff;  // GCC 12 warns about its own functions without a mask
#endif

// `type`: N numbers in a register; `words`, `halves`: their bits, and numbers of half the size.
template <int N>
struct Vector {
  typedef float type __attribute__((vector_size(4 * N)));
  typedef uint32_t words __attribute__((vector_size(4 * N)));
  typedef int32_t signed_words __attribute__((vector_size(4 * N)));
  typedef uint16_t halves __attribute__((vector_size(2 * N)));
  typedef float unaligned __attribute__((vector_size(4 * N), aligned(4), may_alias));
};
template <>
struct Vector<1> {
  typedef float type;
  typedef uint32_t words;
  typedef int32_t signed_words;
  typedef uint16_t halves;
  typedef float unaligned __attribute__((may_alias));
};

template <typename To, typename From>
SOK_INLINE To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Integers of another size, one by one.
template <typename To, int N, typename From>
SOK_INLINE To convert(From x) {
  if constexpr (N == 1) {
    return static_cast<To>(x);
  } else {
    return __builtin_convertvector(x, To);
  }
}

template <int N>
SOK_INLINE typename Vector<N>::words load_halves(const void* p) {
  typename Vector<N>::halves x;
  memcpy(&x, p, sizeof(x));
  return convert<typename Vector<N>::words, N>(x);
}

template <int N>
SOK_INLINE void store_halves(typename Vector<N>::words bits, void* p) {
  const typename Vector<N>::halves x = convert<typename Vector<N>::halves, N>(bits);
  memcpy(p, &x, sizeof(x));
}

template <int N>
SOK_INLINE typename Vector<N>::type read(const float* p) {
  return *reinterpret_cast<const typename Vector<N>::unaligned*>(p);
}

template <int N>
SOK_INLINE void write(typename Vector<N>::type x, float* p) {
  *reinterpret_cast<typename Vector<N>::unaligned*>(p) = x;
}

template <int N>
SOK_INLINE typename Vector<N>::type read(const BFloat16* p) {
  return bits_of<typename Vector<N>::type>(load_halves<N>(p) << 16);
}

template <int N>
SOK_INLINE void write(typename Vector<N>::type x, BFloat16* p) {
  using Words = typename Vector<N>::words;
  const Words bits = bits_of<Words>(x);
  const Words size = bits & 0x7fffffffu;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words quiet = (bits >> 16) | 0x40u;
  store_halves<N>(bits_of<typename Vector<N>::signed_words>(size) > 0x7f800000 ? quiet : rounded, p);
}

template <int N>
SOK_INLINE typename Vector<N>::type read(const Float16* p) {
  using Words = typename Vector<N>::words;
  using Signed = typename Vector<N>::signed_words;
  using Floats = typename Vector<N>::type;
#ifdef __F16C__
  if constexpr (N == 1) {
    return _cvtsh_ss(p->bits);
  } else if constexpr (N == 4) {
    return bits_of<Floats>(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  } else if constexpr (N == 8) {
    return bits_of<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
#endif
#ifdef __AVX512F__
  if constexpr (N == 16) {
    return bits_of<Floats>(_mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  }
#endif
  const Words bits = load_halves<N>(p);
  const Words size = (bits & 0x7fffu) << 13;
  const Words normal = size + (112u << 23);
  const Words infinite = size + (224u << 23);  // and NaN
  const Words smallest = bits_of<Words>(Floats{} + 0x1p-14f);
  const Words subnormal = bits_of<Words>(bits_of<Floats>(size + smallest) - bits_of<Floats>(smallest));
  const Signed order = bits_of<Signed>(size);
  const Words number = order < 0x00800000 ? subnormal : order >= 0x0f800000 ? infinite : normal;
  return bits_of<Floats>(number | (bits & 0x8000u) << 16);
}

template <int N>
SOK_INLINE void write(typename Vector<N>::type x, Float16* p) {
  using Words = typename Vector<N>::words;
  using Signed = typename Vector<N>::signed_words;
  using Floats = typename Vector<N>::type;
#ifdef __F16C__
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT;
  if constexpr (N == 1) {
    p->bits = _cvtss_sh(x, kNearest);
    return;
  } else if constexpr (N == 4) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_cvtps_ph(bits_of<__m128>(x), kNearest));
    return;
  } else if constexpr (N == 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(bits_of<__m256>(x), kNearest));
    return;
  }
#endif
#ifdef __AVX512F__
  if constexpr (N == 16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(kAll, bits_of<__m512>(x), kNearest));
    return;
  }
#endif
  const Words bits = bits_of<Words>(x);
  const Words size = bits & 0x7fffffffu;
  const Signed order = bits_of<Signed>(size);
  const Words normal = (size + 0xfffu + ((size >> 13) & 1u) - (112u << 23)) >> 13;  // an infinity from 65520 on
  const Words half = bits_of<Words>(Floats{} + 0.5f);  // one unit of it is the smallest float16
  const Words subnormal = bits_of<Words>(bits_of<Floats>(size) + bits_of<Floats>(half)) - half;
  const Words nan = 0x7e00u | ((size >> 13) & 0x3ffu);
  const Words infinity = Words{} + 0x7c00u;
  const Words number = order > 0x7f800000    ? nan
                       : order >= 0x47800000 ? infinity
                       : order < 0x38800000  ? subnormal
                                             : normal;
  store_halves<N>(number | (bits & 0x80000000u) >> 16, p);
}

}  // namespace
}  // namespace sok::cpu::SOK_ISA

#endif  // SOK_CPU_KERNELS_ELEMENTS_H_
