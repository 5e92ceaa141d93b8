/* SPDX-License-Identifier: Apache-2.0 */
/* A table is three things, and each stage is told of those that it needs:
 *
 *   placement  key -> rank: route and what else runs where a batch is, and locate
 *   index      key -> slot: locate
 *   columns    arrays over the slots: everything after locate
 *
 * The caller owns all of them, and keeps what they point to alive during a call. */
#ifndef SOK_TABLE_H_
#define SOK_TABLE_H_

#include "sok/context.h"
#include "sok/export.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* owner == -1 ("distributed"): key k belongs to rank k mod num_ranks (the non-negative remainder), and without an index
 * it is slot k div num_ranks there (rounded down). owner >= 0 ("localized"): every key belongs to that rank, where it
 * is its slot. So on one rank a table without an index has its keys for slots. */
typedef struct sok_placement {
  size_t struct_size; /* sizeof(sok_placement) */
  const char* name;   /* UTF-8, used in messages; NULL: "table" */
  int32_t owner;      /* -1, or a rank in [0, num_ranks) */
  int32_t num_ranks;  /* >= 1 */
  int32_t rank;       /* this rank, in [0, num_ranks) */
  int64_t num_rows;   /* >= 1: keys are [0, num_rows); or SOK_ANY_KEY */
  int64_t dimension;  /* elements a row, >= 1 */
} sok_placement;

/* Any integer is a key of the table. It needs an index. */
#define SOK_ANY_KEY (-1)

#define SOK_PLACEMENT_INIT {sizeof(sok_placement), NULL, -1, 1, 0, 0, 0}

/* How many of the keys [0, num_rows) `rank` holds, or -1 when the placement is not valid. Pure arithmetic. */
SOK_EXPORT int64_t sok_placement_local_rows(int64_t num_rows, int32_t owner, int32_t num_ranks, int32_t rank);

struct sok_dynamic_table;
struct sok_index;

/* The rows of a table on this rank.
 *
 * Dtypes. Arithmetic is in float32 whatever the rows are, and so are pooled vectors, gradients and optimizer states.
 * Rows of 16 bits are widened as they are read, which is exact; a changed row is rounded to nearest, ties to even, once
 * a step. Numbers too large become infinities, NaN stays NaN. Tables of one call may differ in dtype. */
typedef struct sok_columns {
  size_t struct_size; /* sizeof(sok_columns) */
  const char* name;   /* as in sok_placement */
  sok_tensor weight;  /* [slots, dimension], SOK_FLOAT32, SOK_FLOAT16 or SOK_BFLOAT16 */

  /* Of tables whose slots change hands (sok/dynamic_table.h), so that no gradient reaches the row of another key. Each
   * call that inserts keys into a table or erases some of its keys begins a generation; they are numbered. */
  sok_tensor since; /* [slots] SOK_INT32: the generation in which each slot got its key; INT32_MAX: it has none. Absent:
                       slots keep their keys */
  int64_t freed;    /* the last generation in which a slot lost its key; 0: none did */
  struct sok_dynamic_table* owner; /* apply tells it that a step is over; NULL: nobody needs to know */

  /* Evaluation: gather_combine and weight_gradient find the rows of a lookup by its keys, which are in `slots`, or in
   * `keys` where these are absent. The table does not change; keys that it does not hold have the initial rows of the
   * owner. NULL: lookups name slots. CPU only; elsewhere rows are read by sok_dynamic_table_read. Other stages ignore
   * it. */
  const struct sok_index* index;
} sok_columns;

#define SOK_COLUMNS_INIT {sizeof(sok_columns), NULL, SOK_NO_TENSOR, SOK_NO_TENSOR, 0, NULL, NULL}

/* Keys whose slots an index is asked for. */
typedef struct sok_index_request {
  const struct sok_index* index;
  sok_tensor keys; /* [n] SOK_INT32 or SOK_INT64 */
  int64_t* slots;  /* [n], out: the slot of each key; -1 where the table does not hold it */
} sok_index_request;

/* Key -> slot of a table whose slots are not those that sok_placement names. */
typedef struct sok_index {
  size_t struct_size; /* sizeof(sok_index) */
  void* self;         /* the index's own */

  /* Serves all requests of a call whose indices have this function, on the context's device and stream; keys and slots
   * lie there. Several requests may name one index. Keys that are outside the table or another rank's do not come, or,
   * on a CUDA device, have been reported to context->errors. flags: those of sok_locate. Returns SOK_OK, or a
   * sok_status that sok_locate returns too. */
  int (*locate)(const sok_context* context, int32_t num_requests, const sok_index_request* requests, uint32_t flags);
} sok_index;

/* Writes rows by slot: row slots[i] becomes values[i]; of equal slots the last one counts.
 *   slots   [n] SOK_INT32 or SOK_INT64
 *   values  [n, dimension], dtype of target; or SOK_FLOAT32, rounded to it
 *   target  [slots, dimension], SOK_FLOAT32 or dtype of columns->weight: columns->weight, or an optimizer state of the
 *           same shape
 * Errors: SOK_OUT_OF_RANGE when a slot is outside the table; nothing is written. */
SOK_EXPORT int sok_assign(const sok_context* context, const sok_columns* columns, sok_tensor slots, sok_tensor values,
                          sok_tensor target);

#ifdef __cplusplus
}
#endif
#endif /* SOK_TABLE_H_ */
