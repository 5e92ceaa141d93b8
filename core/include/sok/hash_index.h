/* SPDX-License-Identifier: Apache-2.0 */
/* The index of a dynamic table: any integer -> a slot, a number that the table's columns are arrays over.
 *
 * Slots. A new key takes the slot that was erased last, or, where none is left, the lowest that was never given out; of
 * the new keys of a call the one whose first occurrence comes first chooses first (requests in their order, keys in
 * theirs). So slots depend on the calls alone: not on the device, the number of threads or how the index lies in
 * memory. A key keeps its slot until it is erased.
 *
 * Memory. An index takes 16 bytes for each of the entries in its table, of which 71 to 87 in a hundred are in use where
 * it has grown, 8 bytes for each slot and 8 for each slot that was erased and not given out again, all in reserved
 * ranges (sok/reserved_range.h). It grows by itself, a part at a time, in proportion to what is inserted.
 *
 * Threads and streams. Calls that find and export may run beside each other. A call that inserts, erases, clears or
 * reserves runs alone: the caller orders it, by threads on the CPU and by streams on CUDA.
 *
 * On CUDA calls do not wait, with an error record, except where a function says so; and where find_or_insert finds no
 * memory to grow for all keys of a call, it waits to see how many are new. Once the record holds something, nothing is
 * inserted or erased. Growing cannot be captured in a CUDA graph: reserve room before, and call sok_hash_index_size
 * after the graph has run, which brings what the host knows up to date. Keys that were chosen so that more than 4096 of
 * them have hashes that are nearly the same may be lost there when the index grows, which is reported. */
#ifndef SOK_HASH_INDEX_H_
#define SOK_HASH_INDEX_H_

#include "sok/context.h"
#include "sok/export.h"
#include "sok/table.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sok_hash_index sok_hash_index;

typedef struct sok_hash_index_config {
  size_t struct_size;   /* sizeof(sok_hash_index_config) */
  sok_device device;    /* where it is to be */
  int64_t capacity;     /* the most keys that it may ever hold, in [1, 2^40]; addresses are reserved for them */
  int64_t initial_rows; /* so many keys fit before it grows, in [0, capacity] */
  const char* name;     /* UTF-8, of the table, for messages; copied. NULL: "table" */
} sok_hash_index_config;

#define SOK_HASH_INDEX_CONFIG_INIT {sizeof(sok_hash_index_config), {SOK_CPU, 0}, 0, 0, NULL}

/* Makes an empty index; the caller owns *index. On CUDA it starts CUDA on the device and waits for it.
 * Errors: SOK_INVALID_ARGUMENT, SOK_RESOURCE_EXHAUSTED, SOK_UNIMPLEMENTED (no CUDA in this build), SOK_UNAVAILABLE. */
SOK_EXPORT int sok_hash_index_create(const sok_hash_index_config* config, sok_hash_index** index);

/* Gives its memory back; NULL is allowed. No call or work that uses it may be pending. */
SOK_EXPORT int sok_hash_index_destroy(sok_hash_index* index);

/* The index as sok_locate takes it, which finds, and with SOK_LOCATE_INSERT finds or inserts. (What the columns hold at
 * a new slot is the caller's.) It belongs to the index and lives as long. */
SOK_EXPORT const sok_index* sok_hash_index_as_index(const sok_hash_index* index);

/* Keys of one index, in a call that may have many. Arrays lie on the device. */
typedef struct sok_hash_index_request {
  sok_hash_index* index;
  sok_tensor keys;   /* [n] SOK_INT32 or SOK_INT64; the same key may occur more than once */
  sok_tensor slots;  /* [n] SOK_INT64, out */
  sok_tensor is_new; /* [n] SOK_UINT8, out, or absent: 1 at the first occurrence of a key that the call inserts, else 0;
                      * only find_or_insert writes it */
} sok_hash_index_request;

/* find: the slot of each key, -1 where the index does not hold it. */
SOK_EXPORT int sok_hash_index_find(const sok_context* context, int32_t num_requests,
                                   const sok_hash_index_request* requests);

/* find_or_insert: the slot of each key; keys that the index did not hold, it holds afterwards. (To insert or assign is
 * this, and sok_assign to the columns at the slots.)
 * Errors: SOK_RESOURCE_EXHAUSTED when the new keys do not fit the capacity, or there is no memory, or more than 4096
 * keys have hashes that are nearly the same; then no index of the call holds a key more than before, and slots are
 * undefined. On CUDA the first and the last are reported as the contents of arrays are (sok/error_record.h). */
SOK_EXPORT int sok_hash_index_find_or_insert(const sok_context* context, int32_t num_requests,
                                             const sok_hash_index_request* requests);

/* erase: the slot that each key had, -1 where the index did not hold it or it occurred before in the call. The slots
 * are free afterwards, the last of them the first to be given out again.
 * Errors: SOK_RESOURCE_EXHAUSTED when there is no memory to note free slots in; nothing is erased. */
SOK_EXPORT int sok_hash_index_erase(const sok_context* context, int32_t num_requests,
                                    const sok_hash_index_request* requests);

/* Grows for `rows` keys in all, at once, so that inserting up to so many takes no more memory later.
 * Errors: SOK_INVALID_ARGUMENT (more than the capacity), SOK_RESOURCE_EXHAUSTED. */
SOK_EXPORT int sok_hash_index_reserve(const sok_context* context, sok_hash_index* index, int64_t rows);

/* Erases all keys. The first slot given out afterwards is 0. Keeps the memory. */
SOK_EXPORT int sok_hash_index_clear(const sok_context* context, sok_hash_index* index);

/* *size (host): keys that it holds. On CUDA it waits for the stream. */
SOK_EXPORT int sok_hash_index_size(const sok_context* context, const sok_hash_index* index, int64_t* size);

/* The keys and slots among the slots [first_slot, first_slot + n), ascending by slot; to see all, call it for all slots
 * below sok_hash_index_num_slots.
 *   keys, slots  [n] SOK_INT64, out: what comes after *count is undefined
 *   count        [1] SOK_INT64, out: how many there are */
SOK_EXPORT int sok_hash_index_export(const sok_context* context, const sok_hash_index* index, int64_t first_slot,
                                     sok_tensor keys, sok_tensor slots, sok_tensor count);

/* What the host knows of it without waiting. All slots given out by the calls so far are below num_slots, on CUDA by
 * some batches at most; columns need so many rows. It changes with calls that insert, erase or clear, and with
 * sok_hash_index_size. `bytes` is the memory that it has. 0 for NULL. */
SOK_EXPORT int64_t sok_hash_index_capacity(const sok_hash_index* index);
SOK_EXPORT int64_t sok_hash_index_num_slots(const sok_hash_index* index);
SOK_EXPORT int64_t sok_hash_index_bytes(const sok_hash_index* index);

#ifdef __cplusplus
}
#endif
#endif /* SOK_HASH_INDEX_H_ */
