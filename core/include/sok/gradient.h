/* SPDX-License-Identifier: Apache-2.0 */
/* Backward stages: spread, reduce, apply, and the gradient of the weights of a lookup. */
#ifndef SOK_GRADIENT_H_
#define SOK_GRADIENT_H_

#include "sok/context.h"
#include "sok/export.h"
#include "sok/lookup.h"
#include "sok/optimizer.h"
#include "sok/table.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* spread: output gradients -> the gradients of what combine read: one for each unique key and each part of a bag.
 *   lookups           as given to route and combine; `output` is not read
 *   output_gradients  [num_lookups] host array of views shaped as `output` of sok_lookup, SOK_FLOAT32; absent: zeros
 *   messages          of what this rank asked for
 *   routing           what route wrote; of it order and unique_splits are read
 *   gradients         out, rank 1, SOK_FLOAT32, laid out as the messages of floats: what sok_owner_gradients reads */
SOK_EXPORT int sok_spread(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                          int32_t num_lookups, const sok_lookup* lookups, const sok_tensor* output_gradients,
                          const struct sok_messages* messages, const sok_routing* routing, sok_tensor gradients);

/* weight_gradient: d loss / d weights of the lookups that have weights, from rows of tables.
 *   lookups           as given to gather_combine; `output` is not read, and `generation` is: rows of slots that have
 *                     lost their keys since are refused, as in sok_gradient
 *   weight_gradients  [num_lookups] host array of views, out [n] SOK_FLOAT32; absent: not wanted
 * With d_i = <output gradient of the bag, r_i>, W = sum(w), S = sqrt(sum(w^2)) of the bag:
 *   sum d_i;  mean (d_i - sum(w d) / W) / W;  sqrtn (d_i - w_i sum(w d) / S^2) / S;  0 where the divisor is 0. */
SOK_EXPORT int sok_weight_gradient(const sok_context* context, int32_t num_tables, const sok_columns* tables,
                                   int32_t num_lookups, const sok_lookup* lookups, const sok_tensor* output_gradients,
                                   const sok_tensor* weight_gradients);

/* The same from exchanged rows; messages, inverse, floats: as given to combine. */
SOK_EXPORT int sok_weight_gradient_of_rows(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                                           int32_t num_lookups, const sok_lookup* lookups,
                                           const sok_tensor* output_gradients, const struct sok_messages* messages,
                                           sok_tensor inverse, sok_tensor floats, const sok_tensor* weight_gradients);

/* One summand of the gradient of a table on this rank. Entry j adds scale(j) * values[v(j)] to the gradient of
 * slots[j]:
 *   v(j)      j's bag; row_splits absent: n == m and v(j) = j, every entry is a bag of its own. Of a lookup of members
 *             values[v(j)] are the columns of v(j)'s member in its row, as in sok_lookup
 *   scale(j)  that of `combiner` and `weights`: w_j, w_j / sum(w) or w_j / sqrt(sum(w^2)) over the bag, 0 where the
 *             divisor is 0. So it is what a lookup's output gradient means without being spread first, and 1 for
 *             summands that came by exchange, which have neither row_splits nor weights */
typedef struct sok_gradient {
  size_t struct_size;    /* sizeof(sok_gradient) */
  int32_t combiner;      /* sok_combiner */
  uint32_t flags;        /* SOK_GRADIENT_UNIQUE or 0 */
  sok_tensor slots;      /* [n] SOK_INT32 or SOK_INT64 */
  sok_tensor values;     /* [m, dimension] SOK_FLOAT32; of members [m / num_members, num_members * dimension] */
  sok_tensor row_splits; /* [m + 1] SOK_INT64, or absent */
  sok_tensor weights;    /* [n] SOK_FLOAT32, or absent */
  int64_t generation;    /* of a table whose slots change hands: the one in which these were located; else not read */
  int32_t num_members;   /* of the lookup; 0: none */
} sok_gradient;

/* The caller vouches that no slot occurs twice in this summand. A hint; it is used where the summand stands alone. */
#define SOK_GRADIENT_UNIQUE 1u

#define SOK_GRADIENT_INIT \
  {sizeof(sok_gradient), SOK_SUM, 0u, SOK_NO_TENSOR, SOK_NO_TENSOR, SOK_NO_TENSOR, SOK_NO_TENSOR, 0, 0}

/* reduce: the summands of one table -> its distinct slots, ascending, and their summed gradients.
 *   slots   out [sum of n] SOK_INT64, the first *count are valid
 *   values  out [sum of n, dimension] SOK_FLOAT32, likewise
 *   count   out [1] SOK_INT64
 * Errors: SOK_OUT_OF_RANGE when a slot is outside table->weight; SOK_FAILED_PRECONDITION when it has lost the key that
 * it was located for. */
SOK_EXPORT int sok_reduce(const sok_context* context, const sok_columns* table, int32_t num_gradients,
                          const sok_gradient* gradients, sok_tensor slots, sok_tensor values, sok_tensor count);

/* One table's optimizer step. */
typedef struct sok_update {
  size_t struct_size;       /* sizeof(sok_update) */
  const sok_columns* table; /* its weight is changed in place; of 16 bits: in float32, then rounded */
  const sok_optimizer* optimizer;
  double gradient_scale; /* 1, or 1 / num_ranks for gradient="mean", or an inverse loss scale */
  int32_t num_states;
  int32_t num_gradients;
  sok_tensor states[SOK_MAX_STATES]; /* SOK_FLOAT32, in the order of optimizer.h; [slots, dimension], or [slots] for
                                        row-wise ones */
  const sok_gradient* gradients;
  sok_tensor stamps; /* [slots] SOK_INT64: set to `stamp` for the rows that change; absent: not kept */
  int64_t stamp;     /* when they change, in whatever units the caller counts time */
} sok_update;

#define SOK_UPDATE_INIT \
  {sizeof(sok_update), NULL, NULL, 1.0, 0, 0, {SOK_NO_TENSOR, SOK_NO_TENSOR, SOK_NO_TENSOR}, NULL, SOK_NO_TENSOR, 0}

/* Asked once by sok_apply, on its thread, when it has found nothing wrong: 0 lets it change rows. It is not asked where
 * sok_apply fails before. Must not throw. On a CUDA device slots and row splits have been read at this point of the
 * stream, and what is in the context's error record by then stops the step: sok_share_errors is to be called here. */
typedef int (*sok_agree)(void* opaque);

/* apply: reduce and the optimizer in one pass over the rows that the summands name; other rows are not touched. A table
 * may occur once in `updates`. Everything is checked before the first row changes. A row that a summand names counts as
 * changed, whatever its gradient is.
 *   agree, opaque  NULL, or what is asked before the first row changes, where several ranks have to agree
 * Errors: SOK_OUT_OF_RANGE, SOK_INVALID_ARGUMENT (a state or stamps whose shape does not fit, a table named twice),
 * SOK_FAILED_PRECONDITION (agree said no; a slot has lost the key that it was located for). */
SOK_EXPORT int sok_apply(const sok_context* context, int32_t num_updates, const sok_update* updates, sok_agree agree,
                         void* opaque);

#ifdef __cplusplus
}
#endif
#endif /* SOK_GRADIENT_H_ */
