// SPDX-License-Identifier: Apache-2.0
// Row by row: sum the gradient, then one optimizer step on the row and its states. The formulas are those of
// common/optimizer_steps.h; here are the loops over columns, which the compiler vectorises.
#ifndef SOK_CPU_KERNELS_OPTIMIZERS_H_
#define SOK_CPU_KERNELS_OPTIMIZERS_H_

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/segments.h"
#include "sok/optimizer.h"

namespace sok::cpu::SOK_ISA {
namespace {

SOK_INLINE float step_root(float x) { return __builtin_sqrtf(x); }
SOK_INLINE float step_power(float x, float power) { return __builtin_powf(x, power); }

#define SOK_STEP SOK_INLINE
#include "common/optimizer_steps.h"
#undef SOK_STEP

using Row = float* __restrict;
using ConstRow = const float* __restrict;

// An optimizer that works column by column, with its flags known to the compiler.
template <typename Step, uint32_t kFlags>
struct ByColumn {
  static constexpr int kStates = Step::kStates;
  static constexpr bool kRowwise = false;

  static SOK_INLINE void step(const OptimizerConstants& k, int64_t n, Row w, Row a, Row b, Row c, ConstRow g) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      float states[3] = {kStates > 0 ? a[i] : 0.0f, kStates > 1 ? b[i] : 0.0f, kStates > 2 ? c[i] : 0.0f};
      float value = w[i];
      Step::element(k, kFlags, g[i], value, states);
      w[i] = value;
      if (kStates > 0) a[i] = states[0];
      if (kStates > 1) b[i] = states[1];
      if (kStates > 2) c[i] = states[2];
    }
  }
};

// Row-wise Adagrad: one accumulator a row.
template <uint32_t kFlags>
struct ByRow {
  static constexpr int kStates = 0;
  static constexpr bool kRowwise = true;

  static SOK_INLINE void step(const OptimizerConstants& k, int64_t n, Row w, Row accumulator, Row, Row, ConstRow g) {
    const float rate = RowwiseAdagradStep::rate(k, kFlags, dot(g, g, n) / static_cast<float>(n), *accumulator);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) w[i] -= rate * g[i];
  }
};

// g as the optimizer sees it, and the decoupled decay of w. Returns `g` itself when there is nothing to do.
__attribute__((noinline)) const float* prepare(const OptimizerConstants& k, int64_t n, Row w, const float* g,
                                               float* scratch) {
  if (k.decoupled_decay != 0.0f) {
    // Not by the factor 1 - decay: rounded once to float32, its error would grow with every step.
    const float decoupled_decay = k.decoupled_decay;
    for (int64_t i = 0; i < n; ++i) w[i] -= decoupled_decay * w[i];
  }
  const float scale = k.gradient_scale, decay = k.weight_decay;
  if (scale == 1.0f && decay == 0.0f) return g;
  if (decay == 0.0f) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) scratch[i] = scale * g[i];
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) scratch[i] = scale * g[i] + decay * w[i];
  }
  return scratch;
}

void load_row(const void* row, sok_dtype dtype, int64_t dimension, float* to) {
  dtype == SOK_FLOAT16 ? copy_row(static_cast<const Float16*>(row), to, dimension)
                       : copy_row(static_cast<const BFloat16*>(row), to, dimension);
}

void round_to(const float* from, int64_t elements, void* to, sok_dtype dtype) {
  dtype == SOK_FLOAT16 ? copy_row(from, static_cast<Float16*>(to), elements)
                       : copy_row(from, static_cast<BFloat16*>(to), elements);
}

template <typename Optimizer>
void update_rows(const UpdateTask& task, int64_t begin, int64_t end, float* scratch) {
  constexpr int kStates = Optimizer::kStates;
  const SegmentReader reader(task.gradients, end);
  const OptimizerConstants k = task.constants;  // a copy: stores to rows cannot change it
  const int64_t dimension = task.gradients.dimension;
  const sok_dtype dtype = task.dtype;
  const int64_t row_bytes = dimension * (dtype == SOK_FLOAT32 ? 4 : 2);
  const int64_t ahead = rows_ahead(row_bytes + 4 * dimension * kStates);
  const bool plain = k.gradient_scale == 1.0f && k.weight_decay == 0.0f && k.decoupled_decay == 0.0f;
  const uint32_t* const slots32 = task.slots32;
  const int64_t* const slots64 = task.slots64;
  char* const weight = static_cast<char*>(task.weight);
  float* const wide = scratch + scratch_row(dimension);  // a row of 16 bits an element, in float32
  float* const states[3] = {task.states[0], task.states[1], task.states[2]};
  const auto slot_of = [=](int64_t u) __attribute__((always_inline)) {
    return slots32 != nullptr ? static_cast<int64_t>(slots32[u]) : slots64[u];
  };
  const auto prefetch = [=](int64_t u) __attribute__((always_inline)) {
    const int64_t slot = slot_of(u);
    prefetch_row(reinterpret_cast<uintptr_t>(weight + slot * row_bytes), row_bytes);
    for (int s = 0; s < kStates; ++s) {
      prefetch_row(reinterpret_cast<uintptr_t>(states[s] + slot * dimension), 4 * dimension);
    }
    if (Optimizer::kRowwise) __builtin_prefetch(states[0] + slot, 0, 2);
  };
  for (int64_t u = begin; u < end && u < begin + ahead; ++u) prefetch(u);
  for (int64_t u = begin; u < end; ++u) {
    if (u + ahead < end) prefetch(u + ahead);
    const int64_t slot = slot_of(u);
    void* const row = weight + slot * row_bytes;
    float* const w = dtype == SOK_FLOAT32 ? static_cast<float*>(row) : wide;
    if (dtype != SOK_FLOAT32) load_row(row, dtype, dimension, wide);
    const float* g = sum_segment<true>(reader, u, scratch);
    if (!plain) g = prepare(k, dimension, w, g, scratch);
    Optimizer::step(k, dimension, w,
                    Optimizer::kRowwise ? states[0] + slot
                    : kStates > 0       ? states[0] + slot * dimension
                                        : nullptr,
                    kStates > 1 ? states[1] + slot * dimension : nullptr,
                    kStates > 2 ? states[2] + slot * dimension : nullptr, g);
    if (dtype != SOK_FLOAT32) round_to(wide, dimension, row, dtype);
  }
}

using UpdateFunction = void (*)(const UpdateTask&, int64_t, int64_t, float*);

// The function that has the flags of `kKnown` that are set built in.
template <template <uint32_t> typename Optimizer, uint32_t kKnown, uint32_t kFlags = 0>
UpdateFunction with_flags(uint32_t flags) {
  if constexpr (kKnown == 0) {
    return update_rows<Optimizer<kFlags>>;
  } else {
    constexpr uint32_t kLowest = kKnown & (~kKnown + 1);
    return (flags & kLowest) != 0 ? with_flags<Optimizer, kKnown - kLowest, kFlags + kLowest>(flags)
                                  : with_flags<Optimizer, kKnown - kLowest, kFlags>(flags);
  }
}

template <uint32_t kFlags>
using Momentum = ByColumn<MomentumStep, kFlags>;
template <uint32_t kFlags>
using Adagrad = ByColumn<AdagradStep, kFlags>;
template <uint32_t kFlags>
using Adamax = ByColumn<AdamaxStep, kFlags>;
template <bool kCentered, bool kMomentum>
struct Rms {
  template <uint32_t kFlags>
  using Prop = ByColumn<RmsPropStep<kCentered, kMomentum>, kFlags>;
};

template <bool kCentered>
UpdateFunction find_rmsprop(const OptimizerConstants& k) {
  constexpr uint32_t kInside = SOK_EPSILON_INSIDE;
  return k.has_momentum
             ? with_flags<Rms<kCentered, true>::template Prop, kInside | SOK_LEARNING_RATE_IN_MOMENTUM>(k.flags)
             : with_flags<Rms<kCentered, false>::template Prop, kInside>(k.flags);
}

UpdateFunction find_update(const OptimizerConstants& k) {
  switch (k.kind) {
    case SOK_MOMENTUM:
      return with_flags<Momentum, SOK_NESTEROV | SOK_LEARNING_RATE_IN_MOMENTUM>(k.flags);
    case SOK_ADAGRAD:
      return with_flags<Adagrad, SOK_EPSILON_INSIDE>(k.flags);
    case SOK_ROWWISE_ADAGRAD:
      return with_flags<ByRow, SOK_EPSILON_INSIDE>(k.flags);
    case SOK_ADAM:
      return update_rows<ByColumn<AdamStep, 0>>;
    case SOK_ADAMAX:
      return with_flags<Adamax, SOK_EPSILON_INSIDE>(k.flags);
    case SOK_ADADELTA:
      return update_rows<ByColumn<AdadeltaStep, 0>>;
    case SOK_RMSPROP:
      return (k.flags & SOK_CENTERED) != 0 ? find_rmsprop<true>(k) : find_rmsprop<false>(k);
    case SOK_FTRL:
      return k.power == 0.5f ? update_rows<ByColumn<FtrlStep<true>, 0>> : update_rows<ByColumn<FtrlStep<false>, 0>>;
    default:
      return update_rows<ByColumn<SgdStep, 0>>;
  }
}

void update(const UpdateTask& task, int64_t begin, int64_t end, float* scratch) {
  find_update(task.constants)(task, begin, end, scratch);
}

}  // namespace
}  // namespace sok::cpu::SOK_ISA

#endif  // SOK_CPU_KERNELS_OPTIMIZERS_H_
