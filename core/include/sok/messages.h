/* SPDX-License-Identifier: Apache-2.0 */
/* What the ranks of a call send each other, and where everything lies in it.
 *
 * A count matrix says it: of the requester what it asks of each rank, of the owner what each rank asks of it. The row
 * of a rank has the columns
 *   num_tables   keys whose rows travel: the unique keys of the lookups that are pooled at the requester, by table
 *   num_lookups  keys of the lookups that are pooled at the owner, 0 for the others
 *   num_lookups  row splits of these: bags + 1 where the table lives on the owner's rank, else 0; 0 for the others
 * Which lookups are pooled where is the requester's choice alone (sok_choose_pooling), so sources may differ.
 *
 * Messages are of two kinds, and each is put together from sections, one after the other:
 *   keys    SOK_INT64    unique keys, by table | keys of bags, by lookup | their row splits, by lookup
 *   floats  SOK_FLOAT32  rows, by table | sums of the parts of bags, by lookup; and their gradients
 * Between the exchanges a section is one array for all ranks, by rank. Functions of this header may be called from any
 * thread. */
#ifndef SOK_MESSAGES_H_
#define SOK_MESSAGES_H_

#include <stddef.h>
#include <stdint.h>

#include "sok/context.h"
#include "sok/export.h"
#include "sok/lookup.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The first SOK_NUM_KEY_SECTIONS are those of messages of keys, the others those of messages of floats. */
typedef enum sok_section {
  SOK_SECTION_KEYS = 0,
  SOK_SECTION_BAG_KEYS = 1,
  SOK_SECTION_BAG_SPLITS = 2,
  SOK_SECTION_ROWS = 3,
  SOK_SECTION_SUMS = 4
} sok_section;

#define SOK_NUM_KEY_SECTIONS 3
#define SOK_NUM_SECTIONS 5

/* What one rank asks for of one table: some rows, or the sums of the bags of one lookup. */
typedef struct sok_message_part {
  int32_t rank; /* of the other side */
  int32_t table;
  int32_t lookup; /* -1: rows */
  int64_t num_keys;
  int64_t num_values;    /* vectors: as many as keys, or bags */
  int64_t first_key;     /* in the section of keys, or of keys of bags */
  int64_t first_split;   /* in the section of row splits, num_values + 1 of them; -1: rows */
  int64_t first_element; /* in the messages of floats of all ranks, by rank */
} sok_message_part;

/* A count matrix read. Every array is in host memory and belongs to the caller. */
typedef struct sok_message_layout {
  size_t struct_size; /* sizeof(sok_message_layout) */
  int32_t num_ranks;
  int32_t num_tables;
  int32_t num_lookups;
  int32_t num_parts;            /* out */
  const int64_t* dimensions;    /* [num_tables] elements of a row */
  const int64_t* lookup_tables; /* [num_lookups] the position of each lookup's table */
  const int64_t* counts;        /* [num_ranks, num_tables + 2 num_lookups] */
  int64_t row_stride;           /* from a row of counts to the next, in elements */
  int64_t* row_counts;          /* out [num_ranks, num_tables] as the stages of rows take them */
  int64_t* sizes;               /* out [SOK_NUM_SECTIONS, num_ranks] elements of each section */
  sok_message_part* parts;      /* out [num_ranks (num_tables + num_lookups)], of which num_parts are set: by rank, rows
                                   by table, then bags by lookup. Rows without keys have none, bags without keys do */
} sok_message_layout;

/* Reads layout->counts. Blocks no longer than that takes, on no stream.
 * Errors: SOK_INVALID_ARGUMENT: a count outside [0, 2^31), keys of bags without row splits, sizes that do not fit an
 * int64, a lookup of no table. The outputs are undefined then. */
SOK_EXPORT int sok_message_layout_read(sok_message_layout* layout);

/* What came from the ranks as lookups of the owner's stages, in the order of its answers: a lookup for each part.
 *   layout   of what each rank asks of this one, as sok_message_layout_read left it
 *   keys     [keys and keys of bags] SOK_INT64, one section after the other; for locate
 *   slots    likewise; locate writes them, gather_combine and gradients read them
 *   splits   the section of row splits, SOK_INT64
 *   floats   the messages of floats, SOK_FLOAT32: the lookups' outputs, and the values of their gradients
 *   lookups  out, host [layout->num_parts]: views of these arrays. Absent ones are absent there; absent row splits say
 *            that the slots of a lookup are distinct, unless `splits` is absent
 * Errors: SOK_INVALID_ARGUMENT: an array of another dtype or size. */
SOK_EXPORT int sok_message_lookups(const sok_message_layout* layout, sok_tensor keys, sok_tensor slots,
                                   sok_tensor splits, sok_tensor floats, sok_lookup* lookups);

/* Puts messages together, those to all ranks one after the other; and takes them apart.
 *   num_sections  of the messages
 *   sizes         host [num_sections, num_ranks] elements, as sok_message_layout_read gave them
 *   sections      host array of views of rank 1 and one dtype, SOK_INT64 or SOK_FLOAT32, each at least as long as its
 *                 section of all ranks; absent where it has nothing. On the context's device
 *   messages      rank 1, the same dtype, as long as all sections together; on the context's device. Where one section
 *                 alone has anything it may be that array, and nothing is copied
 * Runs or enqueues one copy. Errors: SOK_INVALID_ARGUMENT. */
SOK_EXPORT int sok_messages_join(const sok_context* context, int32_t num_ranks, int32_t num_sections,
                                 const int64_t* sizes, const sok_tensor* sections, sok_tensor messages);
SOK_EXPORT int sok_messages_split(const sok_context* context, int32_t num_ranks, int32_t num_sections,
                                  const int64_t* sizes, sok_tensor messages, const sok_tensor* sections);

#ifdef __cplusplus
}
#endif
#endif /* SOK_MESSAGES_H_ */
