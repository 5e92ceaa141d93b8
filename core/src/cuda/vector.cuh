// SPDX-License-Identifier: Apache-2.0
// The piece of a row that one thread holds: kWidth numbers, float32 in registers.
#ifndef SOK_CUDA_VECTOR_CUH_
#define SOK_CUDA_VECTOR_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "cuda/check.h"
#include "sok/types.h"

namespace sok::cuda {

template <int kWidth>
struct Vector {
  float v[kWidth];
};

// A type that one access moves.
template <int kBytes>
struct Access;
template <>
struct Access<2> {
  using type = unsigned short;
};
template <>
struct Access<4> {
  using type = unsigned int;
};
template <>
struct Access<8> {
  using type = uint2;
};
template <>
struct Access<16> {
  using type = uint4;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// To nearest, ties to even.
template <typename T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// kWidth numbers as they lie in memory, moved by one access: T is float, __half or __nv_bfloat16. While rows are on
// their way they take no more registers than that.
template <typename T, int kWidth>
struct Piece {
  using Bits = typename Access<static_cast<int>(sizeof(T)) * kWidth>::type;
  Bits bits;

  // Memory that nobody writes during the kernel.
  static __device__ __forceinline__ Piece load_constant(const T* p) {
    return {__ldg(reinterpret_cast<const Bits*>(p))};
  }
  static __device__ __forceinline__ Piece load(const T* p) { return {*reinterpret_cast<const Bits*>(p)}; }
  __device__ __forceinline__ void store(T* p) const { *reinterpret_cast<Bits*>(p) = bits; }
  // Memory that is not read again soon: it leaves the caches first.
  __device__ __forceinline__ void store_streaming(T* p) const { __stcs(reinterpret_cast<Bits*>(p), bits); }

  __device__ __forceinline__ Vector<kWidth> wide() const {
    T items[kWidth];
    memcpy(items, &bits, sizeof(items));
    Vector<kWidth> result;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) result.v[i] = widen(items[i]);
    return result;
  }
  static __device__ __forceinline__ Piece of(const Vector<kWidth>& x) {
    T items[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) items[i] = narrow<T>(x.v[i]);
    Piece result;
    memcpy(&result.bits, items, sizeof(items));
    return result;
  }
};

template <int kWidth>
__device__ __forceinline__ Vector<kWidth> load_constant(const float* p) {
  return Piece<float, kWidth>::load_constant(p).wide();
}
template <int kWidth>
__device__ __forceinline__ Vector<kWidth> load(const float* p) {
  return Piece<float, kWidth>::load(p).wide();
}
template <int kWidth>
__device__ __forceinline__ void store(const Vector<kWidth>& x, float* p) {
  Piece<float, kWidth>::of(x).store(p);
}
// Of eight numbers in two accesses.
template <int kWidth>
__device__ __forceinline__ void store_streaming(const Vector<kWidth>& x, float* p) {
  constexpr int kAtOnce = kWidth < 4 ? kWidth : 4;
#pragma unroll
  for (int first = 0; first < kWidth; first += kAtOnce) {
    Vector<kAtOnce> part;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) part.v[i] = x.v[first + i];
    Piece<float, kAtOnce>::of(part).store_streaming(p + first);
  }
}

// A piece of a row whose dtype is known when the kernel runs. The compiler sees `dtype` as uniform where it is a
// parameter of the kernel.
template <int kWidth>
struct RowPiece {
  typename Piece<float, kWidth>::Bits bits;

  static __device__ __forceinline__ RowPiece load(const void* rows, sok_dtype dtype, uint64_t at) {
    RowPiece result;
    if (dtype == SOK_FLOAT32) {
      result.bits = Piece<float, kWidth>::load(static_cast<const float*>(rows) + at).bits;
    } else {
      const auto half = Piece<__half, kWidth>::load(static_cast<const __half*>(rows) + at).bits;
      memcpy(&result.bits, &half, sizeof(half));
    }
    return result;
  }
  __device__ __forceinline__ Vector<kWidth> wide(sok_dtype dtype) const {
    if (dtype == SOK_FLOAT32) return Piece<float, kWidth>{bits}.wide();
    Piece<__half, kWidth> half;
    memcpy(&half.bits, &bits, sizeof(half.bits));
    if (dtype == SOK_FLOAT16) return half.wide();
    return Piece<__nv_bfloat16, kWidth>{half.bits}.wide();
  }
};

template <int kWidth>
__device__ __forceinline__ void store_row(const Vector<kWidth>& x, void* rows, sok_dtype dtype, uint64_t at) {
  if (dtype == SOK_FLOAT32) {
    Piece<float, kWidth>::of(x).store(static_cast<float*>(rows) + at);
  } else if (dtype == SOK_FLOAT16) {
    Piece<__half, kWidth>::of(x).store(static_cast<__half*>(rows) + at);
  } else {
    Piece<__nv_bfloat16, kWidth>::of(x).store(static_cast<__nv_bfloat16*>(rows) + at);
  }
}

// Calls f with a null pointer to the type of the elements; on the host.
template <typename F>
void with_element(sok_dtype dtype, F f) {
  switch (dtype) {
    case SOK_FLOAT16:
      return f(static_cast<__half*>(nullptr));
    case SOK_BFLOAT16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    default:
      return f(static_cast<float*>(nullptr));
  }
}

template <int kWidth>
__device__ __forceinline__ Vector<kWidth> zeros() {
  Vector<kWidth> result;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) result.v[i] = 0.0f;
  return result;
}

template <int kWidth>
__device__ __forceinline__ void add(Vector<kWidth>& sum, const Vector<kWidth>& x) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum.v[i] += x.v[i];
}

// sum += scale * x
template <int kWidth>
__device__ __forceinline__ void add_scaled(Vector<kWidth>& sum, float scale, const Vector<kWidth>& x) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum.v[i] = fmaf(scale, x.v[i], sum.v[i]);
}

__device__ __forceinline__ int64_t load_integer(const void* data, bool is_64bit, int64_t i) {
  return is_64bit ? __ldg(static_cast<const long long*>(data) + i)
                  : static_cast<int64_t>(__ldg(static_cast<const int*>(data) + i));
}

// The threads of this one's group of 2^log_lanes, as a mask for shuffles.
__device__ __forceinline__ unsigned group_mask(int log_lanes) {
  const unsigned lane = threadIdx.x & 31u;
  return log_lanes == 5 ? 0xffffffffu : ((1u << (1 << log_lanes)) - 1u) << (lane & ~((1u << log_lanes) - 1u));
}

// The sum over a group, in every thread of it, in an order that depends on the size of the group alone.
__device__ __forceinline__ float group_sum(float value, int log_lanes, unsigned mask) {
  for (int offset = 1; offset < (1 << log_lanes); offset *= 2) value += __shfl_xor_sync(mask, value, offset);
  return value;
}

}  // namespace sok::cuda

#endif  // SOK_CUDA_VECTOR_CUH_
