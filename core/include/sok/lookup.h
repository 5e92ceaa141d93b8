/* SPDX-License-Identifier: Apache-2.0 */
/* Forward stages. Names and order are those of docs/ARCHITECTURE.md.
 *
 * All tables of a call travel together. `tables` and `lookups` are arrays; a lookup names its table by position, and
 * one table may serve several lookups. "Entry" is one (bag, key) pair; the entries of a call are those of lookup 0,
 * then those of lookup 1, and so on: n in all, n < 2^31. */
#ifndef SOK_LOOKUP_H_
#define SOK_LOOKUP_H_

#include "sok/context.h"
#include "sok/export.h"
#include "sok/table.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* With rows r_i and weights w_i of a bag (1 when absent):
 *   SOK_SUM    sum(w_i r_i)
 *   SOK_MEAN   sum(w_i r_i) / sum(w_i)
 *   SOK_SQRTN  sum(w_i r_i) / sqrt(sum(w_i^2))
 * An empty bag, and one whose divisor is 0, gives zeros (and zero gradients). */
typedef enum sok_combiner { SOK_SUM = 0, SOK_MEAN = 1, SOK_SQRTN = 2 } sok_combiner;

/* A member of a stack: one of several tables that are one to the stages, each with keys of its own. Its key k is the
 * key first_key + k of the stack, whose placement knows nothing of members. So that a member's rows are on each rank
 * what those of a table by itself would be, first_key of a distributed stack is a multiple of num_ranks. */
typedef struct sok_member {
  const char* name;  /* UTF-8, used in messages; NULL: "table" */
  int64_t first_key; /* >= 0 */
  int64_t num_rows;  /* >= 1: keys are [0, num_rows); first_key + num_rows is at most num_rows of the stack */
} sok_member;

/* One (table, batch of bags) pair of a call; or of a stack one of several of its members and their batches, which have
 * as many bags each: bag i is bag i mod batch of members[i div batch], where batch = bags / num_members. A member may
 * occur several times. The pooled vectors of such a lookup lie side by side: those of bag b of all members are row b of
 * an array [batch, num_members * dimension], and so are its output gradients. */
typedef struct sok_lookup {
  size_t struct_size;    /* sizeof(sok_lookup) */
  int32_t table;         /* position in the call's `tables` */
  int32_t combiner;      /* sok_combiner */
  sok_tensor keys;       /* [n] SOK_INT32 or SOK_INT64; may be absent where slots are given */
  sok_tensor slots;      /* [n] SOK_INT64: locate writes them, stages after it read them. Absent there: the keys are the
                            slots, as those of a table without an index are on one rank. Else ignored */
  sok_tensor row_splits; /* [bags + 1] SOK_INT64, 0 = s[0] <= s[1] <= ... = n; absent: every key is a bag of its own */
  sok_tensor weights;    /* [n] SOK_FLOAT32; absent: all 1 */
  sok_tensor output;     /* [bags, dimension] SOK_FLOAT32, of members as above; written by gather_combine and combine,
                            else ignored */
  int64_t generation;    /* of the slots, as of sok_gradient; read by weight_gradient, else ignored */
  int32_t num_members;   /* 0: the table is no stack */
  const sok_member* members; /* host [num_members]; read by route and locate, may be NULL elsewhere. locate: the lookup
                                is a requester's, on the one rank that there is */
} sok_lookup;

#define SOK_LOOKUP_INIT                                                                                \
  {sizeof(sok_lookup), 0,         SOK_SUM, SOK_NO_TENSOR, SOK_NO_TENSOR, SOK_NO_TENSOR, SOK_NO_TENSOR, \
   SOK_NO_TENSOR,      INT64_MAX, 0,       NULL}

/* What route makes of a batch; every array belongs to the caller. n: entries of the lookups that are pooled at the
 * requester, numbered without the others. */
typedef struct sok_routing {
  size_t struct_size; /* sizeof(sok_routing) */
  sok_tensor keys;    /* [n] SOK_INT64: the unique keys of each table in send order, that is by owning rank, then by
                               table, then ascending; as many are valid as counts says */
  sok_tensor counts;  /* [num_ranks, k] SOK_INT64: the count matrix (sok/messages.h); further columns become 0. Where no
                               lookup is pooled at its owner, k may be num_tables alone */
  sok_tensor inverse; /* [n] SOK_INT64: for each entry, the offset in elements of its row in the messages of floats */
  sok_tensor order;   /* [n] SOK_INT32: the entries, grouped by unique key in send order */
  sok_tensor unique_splits; /* [n + 1] SOK_INT32: entries of unique key u are order[unique_splits[u] .. [u+1]) */
  sok_tensor bag_keys;      /* [num_bag_keys] SOK_INT64: the keys of lookups that are pooled at the owner, by owning
                               rank, then by lookup, those of a lookup as they came; absent where there are none */
  sok_tensor bag_splits;    /* [num_bag_splits] SOK_INT64: the row splits of their parts, likewise, each from 0 */
} sok_routing;

#define SOK_ROUTING_INIT                                             \
  {sizeof(sok_routing), SOK_NO_TENSOR, SOK_NO_TENSOR, SOK_NO_TENSOR, \
   SOK_NO_TENSOR,       SOK_NO_TENSOR, SOK_NO_TENSOR, SOK_NO_TENSOR}

/* route: checks the keys and row splits, removes duplicates for each table and buckets the rest by owning rank; bags
 * that are pooled at the owner it cuts into parts. All tables share one num_ranks. The caller allocates every array of
 * *routing.
 *   pooled  host [num_lookups], as sok_split_batch chose; NULL: all lookups are pooled at the requester
 * Errors: SOK_OUT_OF_RANGE names table, key and range; SOK_INVALID_ARGUMENT, also for a lookup with weights that is to
 * be pooled at the owner. The outputs are undefined then. */
SOK_EXPORT int sok_route(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                         int32_t num_lookups, const sok_lookup* lookups, const int32_t* pooled,
                         const sok_routing* routing);

/* locate: lookups[i].keys -> lookups[i].slots, on the rank that owns the keys: what came from one rank for one table is
 * a lookup here. Of row splits and weights it is checked that they fit the keys; what row splits hold too, where some
 * table has an index, so that nothing is left to be found wrong once an index has inserted keys.
 *   indices  [num_tables] host array; NULL, or NULL at a table: its slots are those that its placement names
 *   flags    0, or SOK_LOCATE_INSERT and what else of SOK_LOCATE_*
 * Errors: SOK_OUT_OF_RANGE names a key that is outside its table or belongs to another rank; SOK_INVALID_ARGUMENT, also
 * for bags of a table that lives on another rank; what an index returned. The slots are undefined then. */
SOK_EXPORT int sok_locate(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                          const sok_index* const* indices, int32_t num_lookups, const sok_lookup* lookups,
                          uint32_t flags);

/* Indices insert and initialise the keys they lack. */
#define SOK_LOCATE_INSERT 1u
/* Those of them that they admit; others have slots until the step is over (sok_admission in sok/dynamic_table.h). */
#define SOK_LOCATE_ADMIT 2u
/* Of these with their probability. */
#define SOK_LOCATE_FILTER 4u
/* Where no step of a table with eviction runs none begins: the rows are not among those that the next step uses. */
#define SOK_LOCATE_BESIDE 8u

struct sok_messages;

/* combine: exchanged rows and sums -> one vector a bag, in lookups[i].output.
 *   lookups   as given to route; of keys only the number is used
 *   messages  of what this rank asked for; NULL: all lookups are pooled at the requester
 *   inverse   [n] SOK_INT64 as route gave it
 *   floats    rank 1, SOK_FLOAT32: the messages of floats that came */
SOK_EXPORT int sok_combine(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                           int32_t num_lookups, const sok_lookup* lookups, const struct sok_messages* messages,
                           sok_tensor inverse, sok_tensor floats);

/* gather_combine: rows of tables -> one vector a bag, in lookups[i].output. On one rank that is a whole lookup. On an
 * owner it is the stage gather: what came from one rank for one table is a lookup without row splits, whose output are
 * the rows to be sent back, and with row splits of what was cut into parts, the sums of rows (sok_owner_lookups).
 * Errors: SOK_OUT_OF_RANGE names the table, the slot or the key in its place, and the range; the outputs are undefined
 * then. */
SOK_EXPORT int sok_gather_combine(const sok_context* context, int32_t num_tables, const sok_columns* tables,
                                  int32_t num_lookups, const sok_lookup* lookups);

#ifdef __cplusplus
}
#endif
#endif /* SOK_LOOKUP_H_ */
