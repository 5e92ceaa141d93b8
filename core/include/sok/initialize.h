/* SPDX-License-Identifier: Apache-2.0 */
/* Initial rows: a pure function of (seed, key, column), the same for every world size, frontend and device. */
#ifndef SOK_INITIALIZE_H_
#define SOK_INITIALIZE_H_

#include "sok/context.h"
#include "sok/export.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum sok_initializer_kind {
  SOK_CONSTANT = 0,        /* a */
  SOK_UNIFORM = 1,         /* uniform in [a, b) */
  SOK_NORMAL = 2,          /* mean a, standard deviation b */
  SOK_TRUNCATED_NORMAL = 3 /* as SOK_NORMAL, redrawn beyond two standard deviations */
} sok_initializer_kind;

/* Random numbers are Philox4x32-10 (Salmon et al. 2011) keyed by seed, with counter (column block, draw, key). */
typedef struct sok_initializer {
  size_t struct_size; /* sizeof(sok_initializer) */
  int32_t kind;       /* sok_initializer_kind */
  int32_t reserved;
  uint64_t seed;
  double a;
  double b;
} sok_initializer;

#define SOK_INITIALIZER_INIT {sizeof(sok_initializer), SOK_CONSTANT, 0, 0u, 0.0, 0.0}

/* Fills rows with the initial values of keys.
 *   keys  [n] SOK_INT64; absent: row i has key first_key + i * key_stride
 *   rows  out [n, dimension] SOK_FLOAT32; or SOK_FLOAT16 or SOK_BFLOAT16: the float32 values rounded to nearest */
SOK_EXPORT int sok_initialize(const sok_context* context, const sok_initializer* initializer, sok_tensor keys,
                              int64_t first_key, int64_t key_stride, sok_tensor rows);

#ifdef __cplusplus
}
#endif
#endif /* SOK_INITIALIZE_H_ */
