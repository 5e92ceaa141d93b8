// SPDX-License-Identifier: Apache-2.0
// Rules for the segment kernel: the fused optimizers.
#ifndef SOK_CUDA_RULES_CUH_
#define SOK_CUDA_RULES_CUH_

#include "cuda/segment_kernel.cuh"
#include "sok/optimizer.h"

namespace sok::cuda {

__device__ __forceinline__ float step_root(float x) { return sqrtf(x); }
__device__ __forceinline__ float step_power(float x, float power) { return powf(x, power); }

#define SOK_STEP __device__ __forceinline__
#include "common/optimizer_steps.h"
#undef SOK_STEP

// The gradient as the optimizer sees it; decoupled decay of w.
__device__ __forceinline__ float prepare(const OptimizerConstants& k, float g, float& w) {
  g *= k.gradient_scale;
  if (k.weight_decay != 0.0f) g = fmaf(k.weight_decay, w, g);
  w = fmaf(-k.decoupled_decay, w, w);
  return g;
}

// Optimizers whose states have the shape of the table.
template <typename Step>
struct ElementRule {
  static constexpr bool kRowwise = false;
  static constexpr int kStates = Step::kStates;
  static constexpr int kInFlight = 2;
  static constexpr int kBlocks = kStates == 0 ? 4 : 3;  // of a multiprocessor

  template <int kWidth>
  struct Row {
    RowPiece<kWidth> weight;
    Vector<kWidth> states[kStates > 0 ? kStates : 1];
  };

  template <int kWidth>
  static __device__ __forceinline__ Row<kWidth> load(const SegmentTable& t, sok_dtype dtype, uint64_t slot,
                                                     uint32_t column) {
    Row<kWidth> row;
    const uint64_t at = slot * t.stride + column;
    row.weight = RowPiece<kWidth>::load(t.weight, dtype, at);
#pragma unroll
    for (int s = 0; s < kStates; ++s) row.states[s] = sok::cuda::load<kWidth>(t.states[s] + at);
    return row;
  }

  template <int kWidth>
  static __device__ __forceinline__ void finish(const SegmentTable& t, sok_dtype dtype, uint64_t slot, uint32_t column,
                                                const Vector<kWidth>& sum, Row<kWidth>& row, float, bool) {
    const uint32_t flags = t.constants.flags;
    Vector<kWidth> weight = row.weight.wide(dtype);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      float& w = weight.v[i];
      const float g = prepare(t.constants, sum.v[i], w);
      float states[kStates > 0 ? kStates : 1];
#pragma unroll
      for (int s = 0; s < kStates; ++s) states[s] = row.states[s].v[i];
      Step::element(t.constants, flags, g, w, states);
#pragma unroll
      for (int s = 0; s < kStates; ++s) row.states[s].v[i] = states[s];
    }
    const uint64_t at = slot * t.stride + column;
    store_row(weight, t.weight, dtype, at);
#pragma unroll
    for (int s = 0; s < kStates; ++s) store(row.states[s], t.states[s] + at);
  }
};

// Row-wise Adagrad: one accumulator a row.
struct RowwiseRule {
  static constexpr bool kRowwise = true;
  static constexpr int kInFlight = 2;
  static constexpr int kBlocks = 4;

  template <int kWidth>
  struct Row {
    RowPiece<kWidth> weight;
    float accumulator;
  };

  template <int kWidth>
  static __device__ __forceinline__ Row<kWidth> load(const SegmentTable& t, sok_dtype dtype, uint64_t slot,
                                                     uint32_t column) {
    return {RowPiece<kWidth>::load(t.weight, dtype, slot * t.stride + column), t.states[0][slot]};
  }

  template <int kWidth>
  static __device__ __forceinline__ float squares(const OptimizerConstants& k, sok_dtype dtype,
                                                  const Vector<kWidth>& sum, const Row<kWidth>& row) {
    float total = 0.0f;
    const Vector<kWidth> weight = row.weight.wide(dtype);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      float w = weight.v[i];
      const float g = prepare(k, sum.v[i], w);
      total = fmaf(g, g, total);
    }
    return total;
  }

  template <int kWidth>
  static __device__ __forceinline__ void finish(const SegmentTable& t, sok_dtype dtype, uint64_t slot, uint32_t column,
                                                const Vector<kWidth>& sum, Row<kWidth>& row, float mean_square,
                                                bool keeps_state) {
    const float rate = RowwiseAdagradStep::rate(t.constants, t.constants.flags, mean_square, row.accumulator);
    Vector<kWidth> weight = row.weight.wide(dtype);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      float& w = weight.v[i];
      const float g = prepare(t.constants, sum.v[i], w);
      w -= rate * g;
    }
    store_row(weight, t.weight, dtype, slot * t.stride + column);
    if (keeps_state) t.states[0][slot] = row.accumulator;
  }
};

// The sum itself is wanted.
struct StoreRule {
  static constexpr bool kRowwise = false;
  static constexpr int kInFlight = 2;
  static constexpr int kBlocks = 4;

  template <int kWidth>
  struct Row {};

  template <int kWidth>
  static __device__ __forceinline__ Row<kWidth> load(const SegmentTable&, sok_dtype, uint64_t, uint32_t) {
    return {};
  }

  template <int kWidth>
  static __device__ __forceinline__ void finish(const SegmentTable& t, sok_dtype, uint64_t slot, uint32_t column,
                                                const Vector<kWidth>& sum, Row<kWidth>&, float, bool) {
    const int64_t at =
        t.offsets != nullptr ? __ldg(reinterpret_cast<const long long*>(t.offsets) + slot) : slot * t.stride;
    store(sum, static_cast<float*>(t.weight) + at + column);
  }
};

}  // namespace sok::cuda

#endif  // SOK_CUDA_RULES_CUH_
