// SPDX-License-Identifier: Apache-2.0
// The optimizers of sok/optimizer.h on one row at a time. Each `step` is a plain loop over columns that the compiler
// vectorises; square roots and quotients are the exact ones.
#ifndef SOK_CPU_KERNELS_OPTIMIZERS_H_
#define SOK_CPU_KERNELS_OPTIMIZERS_H_

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/segments.h"
#include "sok/optimizer.h"

#define SOK_COLUMNS(c) _Pragma("GCC ivdep") for (int64_t c = 0; c < n; ++c)

namespace sok::cpu::SOK_ISA {
namespace {

using Constants = OptimizerConstants;
using Row = float* __restrict;
using ConstRow = const float* __restrict;

SOK_INLINE float root(float x) { return __builtin_sqrtf(x); }

struct Sgd {
  static constexpr int kStates = 0;
  static SOK_INLINE void step(const Constants& k, int64_t n, Row w, Row, Row, Row, ConstRow g) {
    const float lr = k.learning_rate;
    SOK_COLUMNS(c) w[c] -= lr * g[c];
  }
};

template <bool kNesterov, bool kRateInside>
struct Momentum {
  static constexpr int kStates = 1;
  static SOK_INLINE void step(const Constants& k, int64_t n, Row w, Row m, Row, Row, ConstRow g) {
    const float lr = k.learning_rate, momentum = k.momentum;
    SOK_COLUMNS(c) {
      if (kRateInside) {
        const float step = lr * g[c];
        m[c] = momentum * m[c] - step;
        w[c] += kNesterov ? momentum * m[c] - step : m[c];
      } else {
        m[c] = momentum * m[c] + g[c];
        w[c] -= lr * (kNesterov ? g[c] + momentum * m[c] : m[c]);
      }
    }
  }
};

template <bool kEpsilonInside>
struct Adagrad {
  static constexpr int kStates = 1;
  static SOK_INLINE void step(const Constants& k, int64_t n, Row w, Row a, Row, Row, ConstRow g) {
    const float lr = k.learning_rate, epsilon = k.epsilon;
    SOK_COLUMNS(c) {
      a[c] += g[c] * g[c];
      w[c] -= lr * g[c] / (kEpsilonInside ? root(a[c] + epsilon) : root(a[c]) + epsilon);
    }
  }
};

template <bool kEpsilonInside>
struct RowwiseAdagrad {
  static constexpr int kStates = -1;  // one number a row
  static SOK_INLINE void step(const Constants& k, int64_t n, Row w, Row a, Row, Row, ConstRow g) {
    a[0] += dot(g, g, n) / static_cast<float>(n);
    const float rate = k.learning_rate / (kEpsilonInside ? root(a[0] + k.epsilon) : root(a[0]) + k.epsilon);
    SOK_COLUMNS(c) w[c] -= rate * g[c];
  }
};

struct Adam {
  static constexpr int kStates = 2;
  static SOK_INLINE void step(const Constants& k, int64_t n, Row w, Row m, Row v, Row, ConstRow g) {
    const float lr = k.learning_rate, epsilon = k.epsilon, rate1 = k.one_minus_beta1, rate2 = k.one_minus_beta2;
    SOK_COLUMNS(c) {
      m[c] += rate1 * (g[c] - m[c]);
      v[c] += rate2 * (g[c] * g[c] - v[c]);
      w[c] -= lr * m[c] / (root(v[c]) + epsilon);
    }
  }
};

template <bool kEpsilonInside>
struct Adamax {
  static constexpr int kStates = 2;
  static SOK_INLINE void step(const Constants& k, int64_t n, Row w, Row m, Row v, Row, ConstRow g) {
    const float lr = k.learning_rate, epsilon = k.epsilon, rate1 = k.one_minus_beta1, beta2 = k.beta2;
    SOK_COLUMNS(c) {
      m[c] += rate1 * (g[c] - m[c]);
      const float decayed = beta2 * v[c];
      const float size = __builtin_fabsf(g[c]) + (kEpsilonInside ? epsilon : 0.0f);
      v[c] = decayed > size ? decayed : size;
      w[c] -= lr * m[c] / (kEpsilonInside ? v[c] : v[c] + epsilon);
    }
  }
};

struct Adadelta {
  static constexpr int kStates = 2;
  static SOK_INLINE void step(const Constants& k, int64_t n, Row w, Row a, Row b, Row, ConstRow g) {
    const float lr = k.learning_rate, epsilon = k.epsilon, rho = k.rho, rest = k.one_minus_rho;
    SOK_COLUMNS(c) {
      a[c] = rho * a[c] + rest * (g[c] * g[c]);
      const float delta = g[c] * root(b[c] + epsilon) / root(a[c] + epsilon);
      b[c] = rho * b[c] + rest * (delta * delta);
      w[c] -= lr * delta;
    }
  }
};

enum class Velocity { kNone, kPlain, kRateInside };

template <bool kEpsilonInside, bool kCentered, Velocity kVelocity>
struct RmsProp {
  static constexpr int kStates = 1 + (kCentered ? 1 : 0) + (kVelocity != Velocity::kNone ? 1 : 0);
  static SOK_INLINE void step(const Constants& k, int64_t n, Row w, Row r, Row second, Row third, ConstRow g) {
    const float lr = k.learning_rate, epsilon = k.epsilon, rho = k.rho, rest = k.one_minus_rho;
    const float momentum = k.momentum;
    Row mg = second;
    Row m = kCentered ? third : second;
    SOK_COLUMNS(c) {
      r[c] = rho * r[c] + rest * (g[c] * g[c]);
      float square = r[c];
      if (kCentered) {
        mg[c] = rho * mg[c] + rest * g[c];
        square -= mg[c] * mg[c];
      }
      const float step = g[c] / (kEpsilonInside ? root(square + epsilon) : root(square) + epsilon);
      if (kVelocity == Velocity::kNone) {
        w[c] -= lr * step;
      } else if (kVelocity == Velocity::kPlain) {
        m[c] = momentum * m[c] + step;
        w[c] -= lr * m[c];
      } else {
        m[c] = momentum * m[c] + lr * step;
        w[c] -= m[c];
      }
    }
  }
};

template <bool kSquareRoot>
struct Ftrl {
  static constexpr int kStates = 2;
  static SOK_INLINE float power(const Constants& k, float x) {
    return kSquareRoot ? root(x) : __builtin_powf(x, k.power);
  }
  static SOK_INLINE void step(const Constants& k, int64_t n, Row w, Row a, Row z, Row, ConstRow g) {
    const float lr = k.learning_rate, l1 = k.l1, two_l2 = k.two_l2, shrinkage = k.two_l2_shrinkage;
    const float beta = k.beta_over_lr;
    SOK_COLUMNS(c) {
      const float shrunk = g[c] + shrinkage * w[c];
      const float after = a[c] + g[c] * g[c];
      const float power_after = power(k, after);
      const float linear = z[c] + (shrunk - (power_after - power(k, a[c])) / lr * w[c]);
      const float clipped = linear > l1 ? l1 : linear < -l1 ? -l1 : linear;
      w[c] = (clipped - linear) / (power_after / lr + two_l2 + beta);
      z[c] = linear;
      a[c] = after;
    }
  }
};

// g as the optimizer sees it, and the decoupled decay of w. Returns `g` itself when there is nothing to do.
SOK_INLINE const float* prepare(const Constants& k, int64_t n, Row w, const float* g, float* scratch) {
  if (k.decay_factor != 1.0f) {
    const float factor = k.decay_factor;
    SOK_COLUMNS(c) w[c] *= factor;
  }
  if (k.gradient_scale == 1.0f && k.weight_decay == 0.0f) return g;
  const float scale = k.gradient_scale, decay = k.weight_decay;
  if (decay == 0.0f) {
    SOK_COLUMNS(c) scratch[c] = scale * g[c];
  } else {
    SOK_COLUMNS(c) scratch[c] = scale * g[c] + decay * w[c];
  }
  return scratch;
}

template <typename Optimizer, typename Reader>
void update_rows(const UpdateTask& task, const Reader& reader, int64_t begin, int64_t end, float* scratch) {
  constexpr int kStates = Optimizer::kStates > 0 ? Optimizer::kStates : 0;
  constexpr bool kRowwise = Optimizer::kStates < 0;
  const Constants k = task.constants;  // a copy: stores to rows cannot change it
  const int64_t dimension = task.gradients.dimension;
  const int64_t ahead = rows_ahead(dimension * (1 + kStates));
  const bool plain = k.gradient_scale == 1.0f && k.weight_decay == 0.0f && k.decay_factor == 1.0f;
  const auto slot_of = [&](int64_t u) __attribute__((always_inline)) {
    return task.slots32 != nullptr ? static_cast<int64_t>(task.slots32[u]) : task.slots64[u];
  };
  const auto prefetch = [&](int64_t u) __attribute__((always_inline)) {
    const int64_t slot = slot_of(u);
    prefetch_row<true>(reinterpret_cast<uintptr_t>(task.weight + slot * dimension), dimension);
    for (int s = 0; s < kStates; ++s) {
      prefetch_row<true>(reinterpret_cast<uintptr_t>(task.states[s] + slot * dimension), dimension);
    }
    if (kRowwise) __builtin_prefetch(task.states[0] + slot, 1, 3);
  };
  for (int64_t u = begin; u < end && u < begin + ahead; ++u) prefetch(u);
  for (int64_t u = begin; u < end; ++u) {
    if (u + ahead < end) prefetch(u + ahead);
    const int64_t slot = slot_of(u);
    float* const w = task.weight + slot * dimension;
    const float* g = reader.sum(u, scratch, true);
    if (!plain) g = prepare(k, dimension, w, g, scratch);
    float* states[3] = {nullptr, nullptr, nullptr};
    for (int s = 0; s < kStates; ++s) states[s] = task.states[s] + slot * dimension;
    if (kRowwise) states[0] = task.states[0] + slot;
    Optimizer::step(k, dimension, w, states[0], states[1], states[2], g);
  }
}

template <typename Optimizer>
void update_with(const UpdateTask& task, int64_t begin, int64_t end, float* scratch) {
  with_reader(task.gradients, end,
              [&](const auto& reader) { update_rows<Optimizer>(task, reader, begin, end, scratch); });
}

using UpdateFunction = void (*)(const UpdateTask&, int64_t, int64_t, float*);

template <bool kEpsilonInside, bool kCentered>
UpdateFunction rmsprop(const Constants& k) {
  if (!k.has_momentum) return update_with<RmsProp<kEpsilonInside, kCentered, Velocity::kNone>>;
  return (k.flags & SOK_LEARNING_RATE_IN_MOMENTUM) != 0
             ? update_with<RmsProp<kEpsilonInside, kCentered, Velocity::kRateInside>>
             : update_with<RmsProp<kEpsilonInside, kCentered, Velocity::kPlain>>;
}

UpdateFunction find_update(const Constants& k) {
  const bool nesterov = (k.flags & SOK_NESTEROV) != 0, inside = (k.flags & SOK_EPSILON_INSIDE) != 0;
  switch (k.kind) {
    case SOK_MOMENTUM:
      if ((k.flags & SOK_LEARNING_RATE_IN_MOMENTUM) != 0) {
        return nesterov ? update_with<Momentum<true, true>> : update_with<Momentum<false, true>>;
      }
      return nesterov ? update_with<Momentum<true, false>> : update_with<Momentum<false, false>>;
    case SOK_ADAGRAD:
      return inside ? update_with<Adagrad<true>> : update_with<Adagrad<false>>;
    case SOK_ROWWISE_ADAGRAD:
      return inside ? update_with<RowwiseAdagrad<true>> : update_with<RowwiseAdagrad<false>>;
    case SOK_ADAM:
      return update_with<Adam>;
    case SOK_ADAMAX:
      return inside ? update_with<Adamax<true>> : update_with<Adamax<false>>;
    case SOK_ADADELTA:
      return update_with<Adadelta>;
    case SOK_RMSPROP:
      if ((k.flags & SOK_CENTERED) != 0) return inside ? rmsprop<true, true>(k) : rmsprop<false, true>(k);
      return inside ? rmsprop<true, false>(k) : rmsprop<false, false>(k);
    case SOK_FTRL:
      return k.power == 0.5f ? update_with<Ftrl<true>> : update_with<Ftrl<false>>;
    default:
      return update_with<Sgd>;
  }
}

void update(const UpdateTask& task, int64_t begin, int64_t end, float* scratch) {
  find_update(task.constants)(task, begin, end, scratch);
}

}  // namespace
}  // namespace sok::cpu::SOK_ISA

#endif  // SOK_CPU_KERNELS_OPTIMIZERS_H_
