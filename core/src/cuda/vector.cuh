// SPDX-License-Identifier: Apache-2.0
// The piece of a row that one thread holds: kWidth float32, moved by one access.
#ifndef SOK_CUDA_VECTOR_CUH_
#define SOK_CUDA_VECTOR_CUH_

#include <cstdint>

namespace sok::cuda {

template <int kWidth>
struct Vector;

template <>
struct Vector<1> {
  float v[1];
  // Memory that nobody writes during the kernel.
  static __device__ __forceinline__ Vector load_constant(const float* p) { return {{__ldg(p)}}; }
  static __device__ __forceinline__ Vector load(const float* p) { return {{*p}}; }
  __device__ __forceinline__ void store(float* p) const { *p = v[0]; }
  // Memory that is not read again soon: it leaves the caches first.
  __device__ __forceinline__ void store_streaming(float* p) const { __stcs(p, v[0]); }
};

template <>
struct Vector<4> {
  float v[4];
  static __device__ __forceinline__ Vector of(float4 x) { return {{x.x, x.y, x.z, x.w}}; }
  static __device__ __forceinline__ Vector load_constant(const float* p) {
    return of(__ldg(reinterpret_cast<const float4*>(p)));
  }
  static __device__ __forceinline__ Vector load(const float* p) { return of(*reinterpret_cast<const float4*>(p)); }
  __device__ __forceinline__ void store(float* p) const {
    *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
  }
  __device__ __forceinline__ void store_streaming(float* p) const {
    __stcs(reinterpret_cast<float4*>(p), make_float4(v[0], v[1], v[2], v[3]));
  }
};

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
