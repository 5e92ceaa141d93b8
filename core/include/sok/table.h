/* SPDX-License-Identifier: Apache-2.0 */
/* A table as the stages see it: where its keys live and where this rank's rows lie. */
#ifndef SOK_TABLE_H_
#define SOK_TABLE_H_

#include "sok/context.h"
#include "sok/export.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum sok_table_kind {
  SOK_TABLE_STATIC = 0, /* keys are the row numbers [0, num_rows) */
  SOK_TABLE_DYNAMIC = 1 /* keys are any integers; a hash index gives their slots */
} sok_table_kind;

/* Key -> slot index of a dynamic table. */
typedef struct sok_index sok_index;

/* One table of a call; the caller owns everything it points to and keeps it alive during the call.
 *
 * Placement. owner == -1 ("distributed"): key k belongs to rank k mod num_ranks (the non-negative remainder), where it
 * is slot k div num_ranks of a static table. owner >= 0 ("localized"): every key belongs to that rank, and slot == key.
 *
 * Dtypes. Arithmetic is in float32 whatever the rows are, and so are pooled vectors, gradients and optimizer states.
 * Rows of 16 bits are widened as they are read, which is exact; a changed row is rounded to nearest, ties to even, once
 * a step. Numbers too large become infinities, NaN stays NaN. Tables of one call may differ in dtype.
 *
 * Stages that never touch rows (route, combine, spread) ignore `weight` and `index`. */
typedef struct sok_table {
  size_t struct_size; /* sizeof(sok_table) */
  const char* name;   /* UTF-8, used in messages; NULL: "table" */
  int32_t kind;       /* sok_table_kind */
  int32_t owner;      /* -1, or a rank in [0, num_ranks) */
  int32_t num_ranks;  /* >= 1 */
  int32_t rank;       /* this rank, in [0, num_ranks) */
  int64_t num_rows;   /* rows on all ranks together; static tables only, >= 1 */
  int64_t dimension;  /* elements a row, >= 1 */
  sok_tensor weight;  /* [slots of this rank, dimension], SOK_FLOAT32, SOK_FLOAT16 or SOK_BFLOAT16 */
  sok_index* index;   /* NULL for a static table */
} sok_table;

#define SOK_TABLE_INIT {sizeof(sok_table), NULL, SOK_TABLE_STATIC, -1, 1, 0, 0, 0, SOK_NO_TENSOR, NULL}

/* Rows of a static table that `rank` holds, or -1 when the placement is not valid. Pure arithmetic. */
SOK_EXPORT int64_t sok_table_local_rows(int64_t num_rows, int32_t owner, int32_t num_ranks, int32_t rank);

/* Writes rows by global key: the row of keys[i] becomes values[i]; of equal keys the last one counts. Every key must
 * belong to table->rank.
 *   keys    [n] SOK_INT32 or SOK_INT64
 *   values  [n, dimension], dtype of target; or SOK_FLOAT32, rounded to it
 *   target  [slots, dimension], SOK_FLOAT32 or dtype of table->weight: table->weight, or an optimizer state of the same
 *           shape
 * Errors: SOK_OUT_OF_RANGE names the first key that is outside the table or belongs to another rank; nothing is
 * written. */
SOK_EXPORT int sok_assign(const sok_context* context, const sok_table* table, sok_tensor keys, sok_tensor values,
                          sok_tensor target);

#ifdef __cplusplus
}
#endif
#endif /* SOK_TABLE_H_ */
