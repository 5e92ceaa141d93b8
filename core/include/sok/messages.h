/* SPDX-License-Identifier: Apache-2.0 */
/* What the ranks of a call send each other: how a batch is split, and where everything lies in the messages.
 *
 * Pooling at the owner. Instead of rows, sums of rows may travel. Each bag is cut into parts, one for each rank that
 * its table lives on: all ranks for a distributed table, its owner for a localized one. A part is the bag's keys that
 * this rank owns, duplicates included, and parts of empty bags exist too. The owner sums the rows of a part, the
 * requester adds the parts up and applies the combiner. It pays where bags hold several keys a rank that hardly repeat
 * in the batch. The gradient of a lookup's weights needs rows at the requester, so lookups with weights are not pooled
 * this way. A call may have lookups of both kinds.
 *
 *   split_batch -> route -> swap_counts -> join_keys -> exchange -> locate -> gather_combine -> exchange -> combine
 *   spread -> exchange -> reduce -> apply
 *
 * A count matrix says what one rank asks for: of the requester what it asks of each rank, of the owner what each rank
 * asks of it. The row of a rank has the columns
 *   num_tables   unique keys of the lookups that are pooled at the requester, by table
 *   num_lookups  keys of the lookups that are pooled at the owner, 0 for the others
 *   num_lookups  row splits of these: bags + 1 where the table lives on the owner's rank, else 0; 0 for the others
 * and may have more, which are not read here: the last column of sok_swap_counts. Which lookups are pooled where is the
 * requester's choice alone, so ranks may differ.
 *
 * A message to a rank has these parts, one after the other; those of all ranks are one array, by rank:
 *   keys    SOK_INT64    unique keys, by table | keys of bags, by lookup | row splits of these, by lookup
 *   floats  SOK_FLOAT32  rows, by table | sums of the parts of bags, by lookup; and their gradients */
#ifndef SOK_MESSAGES_H_
#define SOK_MESSAGES_H_

#include "sok/context.h"
#include "sok/export.h"
#include "sok/gradient.h"
#include "sok/lookup.h"
#include "sok/table.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a batch is split, and so how long the arrays of sok_routing are. */
typedef struct sok_batch {
  size_t struct_size;     /* sizeof(sok_batch) */
  int32_t* pooled;        /* out, host [num_lookups]: 1 for lookups that are pooled at the owner, else 0 */
  int64_t num_entries;    /* out: keys of the lookups that are not */
  int64_t num_bag_keys;   /* out: keys of those that are */
  int64_t num_bag_splits; /* out: row splits of the parts of their bags on all ranks */
} sok_batch;

/* Decides by the bytes that would travel: at the owner are pooled lookups with row splits and without weights whose
 * parts of bags are clearly fewer than the rows they would need. Looks at shapes alone; ranks need not agree.
 * SOK_POOLING=owner (wherever it is possible) or requester (never) decides instead.
 * Errors: SOK_INVALID_ARGUMENT, also for another value of SOK_POOLING. */
SOK_EXPORT int sok_split_batch(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                               int32_t num_lookups, const sok_lookup* lookups, sok_batch* batch);

/* The messages of one direction, between this rank and all. Every array is in host memory and the caller's. */
typedef struct sok_messages {
  size_t struct_size;           /* sizeof(sok_messages) */
  int32_t num_ranks;            /* >= 0 */
  int32_t num_tables;           /* >= 0 */
  int32_t num_lookups;          /* >= 0; 0 also where the count matrix has no columns of lookups */
  int32_t num_parts;            /* out: of sok_owner_lookups and sok_owner_gradients */
  const int64_t* dimensions;    /* [num_tables] elements of a row */
  const int64_t* lookup_tables; /* [num_lookups] the position of each lookup's table */
  const int64_t* counts;        /* [num_ranks, row_stride] the count matrix */
  int64_t row_stride;           /* columns of counts, >= num_tables + 2 num_lookups */
  int64_t num_keys;             /* out: elements of the messages of keys of all ranks */
  int64_t num_bag_splits;       /* out: of these row splits. 0: the messages are the unique keys and rows alone */
  int64_t num_floats;           /* out: elements of the messages of floats of all ranks */
} sok_messages;

/* Reads messages->counts.
 *   keys, floats  out, host [num_ranks]: elements of the message of keys, and of floats, of each rank; NULL: not wanted
 * Any thread. Errors: SOK_INVALID_ARGUMENT: a count outside [0, 2^31), keys of bags without row splits, sizes that do
 * not fit the address space, a lookup of no table. The outputs are undefined then. */
SOK_EXPORT int sok_messages_read(sok_messages* messages, int64_t* keys, int64_t* floats);

/* join_keys: what route wrote -> the messages of keys, [messages->num_keys] SOK_INT64. Where num_bag_splits is 0 they
 * are the first elements of routing->keys, and there is no need to copy them.
 *   messages  of what this rank asks for */
SOK_EXPORT int sok_join_keys(const sok_context* context, const sok_messages* messages, const sok_routing* routing,
                             sok_tensor keys);

/* What came as lookups of the owner's stages: for each rank its rows by table, then its bags by lookup.
 *   messages  of what each rank asks of this one, as sok_messages_read left it
 *   keys      [num_keys] SOK_INT64, the messages of keys; where num_bag_splits is 0 they may be SOK_INT32, or absent
 *             where nobody reads them
 *   slots     [num_keys] SOK_INT64: the slot of each key is where the key is in `keys`. What is where row splits are is
 *             neither written nor read
 *   floats    [num_floats] SOK_FLOAT32, the messages of floats: outputs of gather_combine; absent: they have none
 *   lookups   out, host [num_parts]: views of these arrays
 * Any thread. Errors: SOK_INVALID_ARGUMENT: an array of another dtype or size. */
SOK_EXPORT int sok_owner_lookups(const sok_messages* messages, sok_tensor keys, sok_tensor slots, sok_tensor floats,
                                 sok_lookup* lookups);

/* The gradients that came, by table.
 *   keys, slots  as for sok_owner_lookups when slots were located
 *   floats       [num_floats] SOK_FLOAT32, the messages of gradients
 *   gradients    out, host [num_parts]: views of these arrays
 *   first        out, host [num_tables + 1]: those of table t are gradients[first[t] .. first[t + 1]) */
SOK_EXPORT int sok_owner_gradients(const sok_messages* messages, sok_tensor keys, sok_tensor slots, sok_tensor floats,
                                   sok_gradient* gradients, int64_t* first);

#ifdef __cplusplus
}
#endif
#endif /* SOK_MESSAGES_H_ */
