/* SPDX-License-Identifier: Apache-2.0 */
/* The fused optimizers. One step changes a row w and its states from the row's summed gradient g:
 *
 * g = gradient_scale * sum of the row's gradients, then g += weight_decay * w (coupled decay, L2). With
 * SOK_DECOUPLED_WEIGHT_DECAY instead w *= 1 - learning_rate_of_decay * weight_decay before the step.
 *
 *   kind             states            step
 *   SOK_SGD          -                 w -= lr g
 *   SOK_MOMENTUM     momentum          m = momentum m + g,    w -= lr m           (nesterov: w -= lr (g + momentum m))
 *                                      with SOK_LEARNING_RATE_IN_MOMENTUM (Keras):
 *                                      m = momentum m - lr g, w += m              (nesterov: w += momentum m - lr g)
 *   SOK_ADAGRAD      accumulator       a += g^2, w -= lr g / (sqrt(a) + eps)
 *   SOK_ROWWISE_ADAGRAD accumulator [rows]  a += mean(g^2), w -= lr g / (sqrt(a) + eps)
 *   SOK_ADAM         m, v              m += (1 - beta1)(g - m), v += (1 - beta2)(g^2 - v), w -= lr m / (sqrt(v) + eps)
 *   SOK_ADAMAX       m, v              m as Adam, v = max(beta2 v, |g|), w -= lr m / (v + eps)
 *                                      with SOK_EPSILON_INSIDE (PyTorch): v = max(beta2 v, |g| + eps), w -= lr m / v
 *   SOK_ADADELTA     accum_grad,       a = rho a + (1 - rho) g^2, d = g sqrt(b + eps) / sqrt(a + eps),
 *                    accum_var         b = rho b + (1 - rho) d^2, w -= lr d
 *   SOK_RMSPROP      rms [, mg]        r = rho r + (1 - rho) g^2, u = g / (sqrt(r) + eps), w -= lr u
 *                    [, momentum]      SOK_CENTERED: mg = rho mg + (1 - rho) g and r - mg^2 in place of r under
 *                                      the root
 *                                      momentum != 0: m = momentum m + u, w -= lr m
 *                                      with SOK_LEARNING_RATE_IN_MOMENTUM: m = momentum m + lr u, w -= m
 *   SOK_FTRL         accumulator,      gs = g + 2 l2_shrinkage w, a' = a + g^2,
 *                    linear            z += gs - (a'^-p - a^-p) / lr w,
 *                                      w = (clip(z, -l1, l1) - z) / (a'^-p / lr + 2 l2 + beta / lr), a = a'
 *                                      p = learning_rate_power, 0 or less; lr is more than 0
 *
 * With SOK_EPSILON_INSIDE Adagrad, row-wise Adagrad and RMSprop divide by sqrt(a + eps) in place of sqrt(a) + eps. Bias
 * corrections depend on the step alone: the caller folds them into lr and eps (Adam of Keras: lr sqrt(1 - beta2^t) /
 * (1 - beta1^t); of PyTorch the same, with eps sqrt(1 - beta2^t)).
 *
 * Sources: Duchi et al. 2011 (Adagrad), Zeiler 2012 (Adadelta), Tieleman and Hinton 2012 (RMSprop), McMahan et al. 2013
 * (Ftrl), Kingma and Ba 2015 (Adam, Adamax), Loshchilov and Hutter 2019 (decoupled decay), Mudigere et al. 2022
 * (row-wise Adagrad). */
#ifndef SOK_OPTIMIZER_H_
#define SOK_OPTIMIZER_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum sok_optimizer_kind {
  SOK_SGD = 0,
  SOK_MOMENTUM = 1,
  SOK_ADAGRAD = 2,
  SOK_ROWWISE_ADAGRAD = 3,
  SOK_ADAM = 4,
  SOK_ADAMAX = 5,
  SOK_ADADELTA = 6,
  SOK_RMSPROP = 7,
  SOK_FTRL = 8
} sok_optimizer_kind;

#define SOK_NESTEROV 1u
#define SOK_EPSILON_INSIDE 2u
#define SOK_LEARNING_RATE_IN_MOMENTUM 4u
#define SOK_CENTERED 8u
#define SOK_DECOUPLED_WEIGHT_DECAY 16u

#define SOK_MAX_STATES 3

/* Fields that a kind does not name are ignored. Rounded to the dtype of the arithmetic (float32) once a call. */
typedef struct sok_optimizer {
  size_t struct_size; /* sizeof(sok_optimizer) */
  int32_t kind;       /* sok_optimizer_kind */
  uint32_t flags;
  double learning_rate; /* lr, bias correction included */
  double learning_rate_of_decay;
  double weight_decay;
  double momentum;
  double beta1;
  double beta2;
  double rho;
  double epsilon;
  double l1;
  double l2;
  double l2_shrinkage;
  double beta;
  double learning_rate_power; /* p, <= 0; -0.5 is the usual one */
} sok_optimizer;

#define SOK_OPTIMIZER_INIT \
  {sizeof(sok_optimizer), SOK_SGD, 0u, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -0.5}

#ifdef __cplusplus
}
#endif
#endif /* SOK_OPTIMIZER_H_ */
