// SPDX-License-Identifier: Apache-2.0
// The settings of one optimizer step as the row loops of every backend read them. Plain data: nothing here includes the
// C++ library.
#ifndef SOK_COMMON_OPTIMIZER_CONSTANTS_H_
#define SOK_COMMON_OPTIMIZER_CONSTANTS_H_

#include <stdint.h>

namespace sok {

struct OptimizerConstants {
  int32_t kind;
  uint32_t flags;
  bool has_momentum;  // RMSprop: a momentum state is there
  float gradient_scale;
  float weight_decay;     // coupled; 0 when there is none
  float decoupled_decay;  // learning_rate_of_decay * weight_decay when decoupled, else 0
  float learning_rate;
  float momentum;
  float one_minus_beta1;
  float beta2, one_minus_beta2;
  float rho, one_minus_rho;
  float epsilon;
  float l1, two_l2, two_l2_shrinkage, beta_over_lr;
  float power;  // -learning_rate_power
};

}  // namespace sok

#endif  // SOK_COMMON_OPTIMIZER_CONSTANTS_H_
