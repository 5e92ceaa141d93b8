// SPDX-License-Identifier: Apache-2.0
// The optimizers of sok/optimizer.h on one element: the only place that knows their formulas. Backends supply the
// loops.
//
// The includer defines SOK_STEP (the qualifiers of the functions) and includes this file inside a namespace of its own,
// so that no two instruction sets share a function. `flags` are those of the optimizer; a loop that passes a constant
// gets a loop without branches. Square roots and quotients are the exact ones.
//
// There is no include guard: each includer compiles its own copy.

struct SgdStep {
  static constexpr int kStates = 0;
  SOK_STEP static void element(const OptimizerConstants& k, uint32_t, float g, float& w, float*) {
    w -= k.learning_rate * g;
  }
};

struct MomentumStep {  // states: momentum
  static constexpr int kStates = 1;
  SOK_STEP static void element(const OptimizerConstants& k, uint32_t flags, float g, float& w, float* s) {
    if (flags & SOK_LEARNING_RATE_IN_MOMENTUM) {
      const float step = k.learning_rate * g;
      s[0] = k.momentum * s[0] - step;
      w += flags & SOK_NESTEROV ? k.momentum * s[0] - step : s[0];
    } else {
      s[0] = k.momentum * s[0] + g;
      w -= k.learning_rate * (flags & SOK_NESTEROV ? g + k.momentum * s[0] : s[0]);
    }
  }
};

struct AdagradStep {  // states: accumulator
  static constexpr int kStates = 1;
  SOK_STEP static void element(const OptimizerConstants& k, uint32_t flags, float g, float& w, float* s) {
    s[0] += g * g;
    w -= k.learning_rate * g / (flags & SOK_EPSILON_INSIDE ? step_root(s[0] + k.epsilon) : step_root(s[0]) + k.epsilon);
  }
};

struct RowwiseAdagradStep {  // one accumulator a row
  static constexpr int kStates = 0;
  // What every element's gradient is multiplied by; `mean_square` is that of the row's gradient.
  SOK_STEP static float rate(const OptimizerConstants& k, uint32_t flags, float mean_square, float& accumulator) {
    accumulator += mean_square;
    const float size =
        flags & SOK_EPSILON_INSIDE ? step_root(accumulator + k.epsilon) : step_root(accumulator) + k.epsilon;
    return k.learning_rate / size;
  }
};

struct AdamStep {  // states: m, v
  static constexpr int kStates = 2;
  SOK_STEP static void element(const OptimizerConstants& k, uint32_t, float g, float& w, float* s) {
    s[0] += k.one_minus_beta1 * (g - s[0]);
    s[1] += k.one_minus_beta2 * (g * g - s[1]);
    w -= k.learning_rate * s[0] / (step_root(s[1]) + k.epsilon);
  }
};

struct AdamaxStep {  // states: m, v
  static constexpr int kStates = 2;
  SOK_STEP static void element(const OptimizerConstants& k, uint32_t flags, float g, float& w, float* s) {
    s[0] += k.one_minus_beta1 * (g - s[0]);
    const float decayed = k.beta2 * s[1];
    const float size = (g < 0.0f ? -g : g) + (flags & SOK_EPSILON_INSIDE ? k.epsilon : 0.0f);
    s[1] = decayed > size ? decayed : size;
    w -= k.learning_rate * s[0] / (flags & SOK_EPSILON_INSIDE ? s[1] : s[1] + k.epsilon);
  }
};

struct AdadeltaStep {  // states: accumulated gradients, accumulated steps
  static constexpr int kStates = 2;
  SOK_STEP static void element(const OptimizerConstants& k, uint32_t, float g, float& w, float* s) {
    s[0] = k.rho * s[0] + k.one_minus_rho * (g * g);
    const float delta = g * step_root(s[1] + k.epsilon) / step_root(s[0] + k.epsilon);
    s[1] = k.rho * s[1] + k.one_minus_rho * (delta * delta);
    w -= k.learning_rate * delta;
  }
};

// states: mean square [, mean gradient] [, momentum]
template <bool kCentered, bool kMomentum>
struct RmsPropStep {
  static constexpr int kStates = 1 + (kCentered ? 1 : 0) + (kMomentum ? 1 : 0);
  SOK_STEP static void element(const OptimizerConstants& k, uint32_t flags, float g, float& w, float* s) {
    s[0] = k.rho * s[0] + k.one_minus_rho * (g * g);
    float square = s[0];
    if constexpr (kCentered) {
      s[1] = k.rho * s[1] + k.one_minus_rho * g;
      square -= s[1] * s[1];
    }
    const float step = g / (flags & SOK_EPSILON_INSIDE ? step_root(square + k.epsilon) : step_root(square) + k.epsilon);
    if constexpr (!kMomentum) {
      w -= k.learning_rate * step;
    } else {
      float& m = s[kStates - 1];
      if (flags & SOK_LEARNING_RATE_IN_MOMENTUM) {
        m = k.momentum * m + k.learning_rate * step;
        w -= m;
      } else {
        m = k.momentum * m + step;
        w -= k.learning_rate * m;
      }
    }
  }
};

template <bool kSquareRoot>
struct FtrlStep {  // states: accumulator, linear
  static constexpr int kStates = 2;
  SOK_STEP static float power(const OptimizerConstants& k, float x) {
    return kSquareRoot ? step_root(x) : step_power(x, k.power);
  }
  SOK_STEP static void element(const OptimizerConstants& k, uint32_t, float g, float& w, float* s) {
    const float lr = k.learning_rate, l1 = k.l1;
    const float shrunk = g + k.two_l2_shrinkage * w;
    const float after = s[0] + g * g;
    const float power_after = power(k, after);
    const float linear = s[1] + (shrunk - (power_after - power(k, s[0])) / lr * w);
    const float clipped = linear > l1 ? l1 : linear < -l1 ? -l1 : linear;
    w = (clipped - linear) / (power_after / lr + k.two_l2 + k.beta_over_lr);
    s[1] = linear;
    s[0] = after;
  }
};
