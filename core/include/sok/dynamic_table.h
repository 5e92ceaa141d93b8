/* SPDX-License-Identifier: Apache-2.0 */
/* A dynamic table: an index (sok/hash_index.h) and the columns over its slots, which grow in place, together.
 *
 * Column 0 is the rows; others are optimizer states, stamps and whatever else there is one of for each slot. Every
 * column is one reserved range (sok/reserved_range.h), so its address stays while it grows. A slot that a key gets, new
 * or used before by another key, has its initial values in all columns: of the rows those of (seed, key, column), of
 * the others one number.
 *
 * A table is used like its index: calls that find, read and export may run beside each other; a call that inserts,
 * erases or adds a column runs alone, in the order of threads on the CPU and of streams on CUDA.
 *
 * On CUDA calls do not wait, with an error record. What a call inserts is not known when it is enqueued, so columns
 * grow for all its keys; where there is no memory for that, it waits to see how many of those before were new. Once the
 * record holds something, nothing is inserted, evicted or erased, and no use of a row counts. What is captured in a
 * CUDA graph inserts into the memory that the table has then (initial_rows), and reports SOK_RESOURCE_EXHAUSTED where
 * that is not enough; into a table with eviction, expiry or admission it cannot insert (SOK_FAILED_PRECONDITION), since
 * each call of these is a generation of its own. */
#ifndef SOK_DYNAMIC_TABLE_H_
#define SOK_DYNAMIC_TABLE_H_

#include "sok/context.h"
#include "sok/export.h"
#include "sok/hash_index.h"
#include "sok/initialize.h"
#include "sok/table.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sok_dynamic_table sok_dynamic_table;

/* Which rows a table gives up where it holds as many as its capacity and keys come that it does not hold. It gives up
 * one for each of these, and no other. Rows that the running step uses (those located since the last sok_apply to the
 * table) go only where there are no others, and those of the running call never. Ranks are found by looking at all rows
 * once for every 64th of them that goes; rows that came or were used in between are not among those. Of equal rank the
 * row whose last use is longer ago goes first. The same calls evict the same rows, on the CPU and on CUDA. A call that
 * fails evicts nothing; the uses of rows by its keys have counted then.
 *
 * What counts as a use of a row is a call of sok_locate that inserts and has its key, however often. */
typedef enum sok_eviction {
  SOK_EVICT_NOTHING = 0,   /* inserting beyond the capacity is an error */
  SOK_EVICT_LRU = 1,       /* least recently used first */
  SOK_EVICT_LFU = 2,       /* least often used first */
  SOK_EVICT_EPOCH_LRU = 3, /* by the epoch of the last use (sok_dynamic_table_set_epoch), then as LRU */
  SOK_EVICT_EPOCH_LFU = 4, /* by that epoch, 2046 at most, then as LFU; counts end at 1,048,575 */
  SOK_EVICT_CUSTOMIZED = 5 /* lowest rank first, as sok_dynamic_table_set_scores gave it; 0 at first */
} sok_eviction;

/* Which keys that a table lacks get rows where sok_locate is called with SOK_LOCATE_ADMIT. Others are guests of a step:
 * they have slots with initial values, the table does not hold them, and what a step makes of their rows is lost.
 * Slots of guests are free again with the first call that inserts after the step. A gradient of a guest that is older
 * is refused, as that of a row that was evicted.
 *
 * What counts is a call that has the key, however often, also one that fails. Candidates are the keys that wait; where
 * there are more than max_candidates, those go that were asked for least often, of these the longest ago, and begin
 * again. A candidate takes some 44 bytes. */
typedef struct sok_admission {
  int64_t threshold;      /* the call that gives a key a row, counted from 1; 0 and 1: the first */
  int64_t max_candidates; /* 0: as many as the table's capacity */
  double filter_ratio; /* with SOK_LOCATE_FILTER: the probability, in [0, 1], that a key gets a row in a call in which
                             it may, drawn by the initializer's seed, the key and the generation */
} sok_admission;

#define SOK_ADMISSION_INIT {0, 0, 1}

typedef struct sok_dynamic_table_config {
  size_t struct_size;          /* sizeof(sok_dynamic_table_config) */
  sok_hash_index_config index; /* device, capacity, initial_rows and name are also the table's */
  int64_t dimension;           /* elements a row, >= 1 */
  int32_t dtype;               /* of the rows: SOK_FLOAT32, SOK_FLOAT16 or SOK_BFLOAT16 */
  sok_initializer initializer; /* of the rows */
  int32_t eviction;            /* sok_eviction; on CUDA where the capacity is below 2^32, with admission 2^31 */
  int32_t reserved;
  int64_t half_life; /* generations after which the counts of LFU are halved, again and again; 0: never */
  sok_admission admission;
  /* Rows that no call that inserts has used for so many seconds are erased, whether the table is full or not; 0: none.
   * Every such call looks at twice as many rows as it has keys, in turn, so a row goes with the last of the calls that
   * have looked at all of them once more. To a 64th of the time. */
  double time_to_live;
  /* On CUDA: rows of the first so many slots are in the device's memory, in every column, and all others in the host's,
   * page-locked, where kernels reach them over PCIe. 0: all are the device's.
   * sok_locate with SOK_LOCATE_INSERT, and sok_dynamic_table_prefetch, make rows that they are asked for change places
   * with rows of the first slots that would be given up first (least recently used, where nothing is evicted) and that
   * the running step does not use; as many as there are of those. A row's slot is another one then, and gradients of
   * older slots are refused as those of rows that went. Below 2^32. On the CPU all rows are in one memory, and this
   * is nothing. */
  int64_t device_rows;
} sok_dynamic_table_config;

#define SOK_DYNAMIC_TABLE_CONFIG_INIT \
  {sizeof(sok_dynamic_table_config),  \
   SOK_HASH_INDEX_CONFIG_INIT,        \
   0,                                 \
   SOK_FLOAT32,                       \
   SOK_INITIALIZER_INIT,              \
   0,                                 \
   0,                                 \
   0,                                 \
   SOK_ADMISSION_INIT,                \
   0,                                 \
   0}

/* Makes an empty table; the caller owns *table. On CUDA it starts CUDA on the device and waits for it.
 * Errors: as sok_hash_index_create; SOK_RESOURCE_EXHAUSTED also where there are no addresses for the columns. */
SOK_EXPORT int sok_dynamic_table_create(const sok_dynamic_table_config* config, sok_dynamic_table** table);

/* Gives its memory back; NULL is allowed. No call or work that uses it may be pending. */
SOK_EXPORT int sok_dynamic_table_destroy(sok_dynamic_table* table);

/* The table as sok_locate takes it: without SOK_LOCATE_INSERT it finds, and with it inserts what it does not find, and
 * the slots are ready to be used in every column. Errors of inserting are those of sok_hash_index_find_or_insert, also
 * where a column cannot grow; the table holds what it held then. It belongs to the table and lives as long. */
SOK_EXPORT const sok_index* sok_dynamic_table_as_index(const sok_dynamic_table* table);

/* The index itself, to find, export, reserve and count. To insert, erase and clear is for the table. It belongs to the
 * table, until that is destroyed or shrinks. */
SOK_EXPORT sok_hash_index* sok_dynamic_table_hash_index(const sok_dynamic_table* table);

/* How often sok_locate has inserted into it and keys were erased: the generation of the slots that the last sok_locate
 * gave, for sok_gradient. After 2^31 - 3 all are numbered anew, 2^30 lower: those that were below 2^30 cannot be told
 * apart any more, and gradients from before are known by numbers above the table's. A CUDA graph that inserts repeats
 * the generation of its capture: capture it anew then. */
SOK_EXPORT int64_t sok_dynamic_table_generation(const sok_dynamic_table* table);

/* Column 0 and the generations of its slots, as the stages after sok_locate take them; num_slots as of
 * sok_dynamic_table_column. */
SOK_EXPORT sok_columns sok_dynamic_table_columns(const sok_dynamic_table* table);

/* Erases keys, as sok_hash_index_erase does. A gradient for a row of them is refused from now on.
 *   keys   [n] SOK_INT32 or SOK_INT64
 *   slots  [n] SOK_INT64, out: those that the keys had, or -1 */
SOK_EXPORT int sok_dynamic_table_erase(const sok_context* context, sok_dynamic_table* table, sok_tensor keys,
                                       sok_tensor slots);

/* Erases all keys, and keeps the memory. */
SOK_EXPORT int sok_dynamic_table_clear(const sok_context* context, sok_dynamic_table* table);

/* Gives memory back that no row uses: rows move to the lowest slots, in the order of those that they had, and the index
 * is made anew for as many keys. Gradients of rows that were located before are refused from now on, and what
 * sok_dynamic_table_hash_index gave is gone. Memory is needed for 16 bytes a row, and for the new index beside the old
 * one; on CUDA for 64 MiB besides. On CUDA it waits for the stream, and cannot be captured in a CUDA graph.
 *   *freed  the bytes, host
 * Errors: SOK_RESOURCE_EXHAUSTED; the table is as it was. */
SOK_EXPORT int sok_dynamic_table_shrink(const sok_context* context, sok_dynamic_table* table, int64_t* freed);

/* Brings rows to the device's memory before a step asks for them (sok_dynamic_table_config::device_rows). Keys that a
 * table does not hold are passed over; of rows that the running step uses none moves. The last use of a row becomes
 * this call, without being counted as one. Does nothing for tables that are in one memory.
 *   tables  [n]; one may occur several times
 *   keys    [n], each [any] SOK_INT32 or SOK_INT64
 * On CUDA it takes copies of the keys on context->stream, and goes on beside it on a stream of its own, after what was
 * enqueued on context->stream before; later calls to the tables come after it, on whichever stream they are. Neither
 * may be captured in a CUDA graph while it runs.
 * Errors: SOK_INVALID_ARGUMENT, SOK_FAILED_PRECONDITION (context->stream is being captured), SOK_RESOURCE_EXHAUSTED. */
SOK_EXPORT int sok_dynamic_table_prefetch(const sok_context* context, int32_t n, sok_dynamic_table* const* tables,
                                          const sok_tensor* keys);

/* The step is over: rows located until now may be evicted. sok_apply says so itself to the tables that it changes. */
SOK_EXPORT int sok_dynamic_table_end_step(sok_dynamic_table* table);

/* The epoch of what is used from now on, for the strategies by epoch.
 * Errors: SOK_INVALID_ARGUMENT (negative). */
SOK_EXPORT int sok_dynamic_table_set_epoch(sok_dynamic_table* table, int64_t epoch);

/* What rows are evicted by, [num_slots] SOK_INT64: 2^32 times the rank that the strategy gives a row, plus the
 * generation of its last use; INT64_MAX where a slot has lost its key; undefined where it never had one. SOK_NO_TENSOR
 * where nothing is evicted and nothing expires. */
SOK_EXPORT sok_tensor sok_dynamic_table_scores(const sok_dynamic_table* table);

/* The last generation that is known to have begun so many seconds ago or earlier: rows whose last use it was, or an
 * earlier one, have not been used for so long. To a second, or a 64th of time_to_live. 0: none is known, as where
 * there are no scores. */
SOK_EXPORT int64_t sok_dynamic_table_generation_before(const sok_dynamic_table* table, double seconds);

/* The last generation before the running step. A row whose last use, the lower half of its score
 * (sok_dynamic_table_scores), is later is used by the step: once it is erased, the step's gradient is refused. 0 where
 * there are no scores, and for NULL. sok_apply and sok_dynamic_table_end_step end a step. So do times that are given by
 * sok_dynamic_table_set_use_times, and scores of later generations by sok_dynamic_table_set_scores. */
SOK_EXPORT int64_t sok_dynamic_table_running_since(const sok_dynamic_table* table);

/* A generation, and when it began as far as the table knows: nanoseconds of UTC since 1970. */
typedef struct sok_use_time {
  int64_t generation;
  int64_t time;
} sok_use_time;

/* What generations are known by, to be kept with scores: both ascend. A row is as old as the first of these whose
 * generation is not before that of its last use; where there is none it was used now.
 *   times    [size], out: the first of them, host
 * Returns how many there are, 65536 at most. */
SOK_EXPORT int64_t sok_dynamic_table_use_times(const sok_dynamic_table* table, int64_t size, sok_use_time* times);

/* Replaces them, as where scores of another table come, or of this one as it was. What is closer to another than a
 * second, or a 64th of time_to_live, is left out, and no row becomes older by it. The table goes on from the latest.
 *   times    [n], host; generations below 2^31 - 2
 * Errors: SOK_INVALID_ARGUMENT (they do not ascend, or are no such generations; n is negative; a table without scores);
 * nothing has changed. */
SOK_EXPORT int sok_dynamic_table_set_use_times(sok_dynamic_table* table, int64_t n, const sok_use_time* times);

/* Gives rows scores, such as those of sok_dynamic_table_scores that were kept with a checkpoint. The table goes on from
 * the latest generation among them, if it is later than its own, and, where rows go by epoch, from the latest epoch.
 *   slots   [n] SOK_INT64; -1 and slots without a key are passed over
 *   scores  [n] SOK_INT64, each in [0, 2^63 - 2^32), its lower half below 2^31 - 2; of a slot that occurs twice one of
 *           them counts
 * On CUDA it waits for the stream, and cannot be captured in a CUDA graph.
 * Errors: SOK_INVALID_ARGUMENT, also where the table evicts nothing; SOK_OUT_OF_RANGE (a slot that is not below
 * num_slots); no score is changed. On CUDA what scores and slots hold is reported as the contents of arrays are
 * (sok/error_record.h). */
SOK_EXPORT int sok_dynamic_table_set_scores(const sok_context* context, sok_dynamic_table* table, sok_tensor slots,
                                            sok_tensor scores);

/* What has happened to a table since it was made. */
typedef struct sok_dynamic_table_counts {
  size_t struct_size; /* sizeof(sok_dynamic_table_counts) */
  int64_t lookups;    /* keys located by calls that insert, duplicates counted */
  int64_t insertions;
  int64_t evictions;
  int64_t refusals;    /* guests, each once a call */
  int64_t expirations; /* rows erased because of time_to_live */
  /* With device_rows, of keys located by calls that insert, duplicates counted: those whose rows were in the device's
   * memory, and in the host's; and rows that came from there to the device's. */
  int64_t device_hits;
  int64_t host_hits;
  int64_t moves;
} sok_dynamic_table_counts;

#define SOK_DYNAMIC_TABLE_COUNTS_INIT {sizeof(sok_dynamic_table_counts), 0, 0, 0, 0, 0, 0, 0, 0}

/* *counts (host); on CUDA insertions, evictions, refusals and expirations as far as the host has heard, all of them
 * after sok_hash_index_size.
 * Errors: SOK_INVALID_ARGUMENT. */
SOK_EXPORT int sok_dynamic_table_get_counts(const sok_dynamic_table* table, sok_dynamic_table_counts* counts);

/* The keys that wait for rows: a table of one number a row, whose ranks count the calls that asked for them. It belongs
 * to the table and lives as long; what is found out here about a table may be found out about it, and keys and scores
 * that were kept with a checkpoint may be given to it. NULL where none wait. */
SOK_EXPORT sok_dynamic_table* sok_dynamic_table_candidates(const sok_dynamic_table* table);

/* Adds a column, with `initial` at every slot there is.
 *   dtype    SOK_FLOAT32 or SOK_INT64
 *   width    elements a slot, >= 1
 *   initial  rounded to the dtype; 0 for SOK_INT64
 *   *column  its number, from 1 on
 * Errors: SOK_INVALID_ARGUMENT, SOK_RESOURCE_EXHAUSTED; no column is added then. */
SOK_EXPORT int sok_dynamic_table_add_column(const sok_context* context, sok_dynamic_table* table, int32_t dtype,
                                            int64_t width, double initial, int32_t* column);

/* [num_slots, width] of a column, num_slots as of sok_hash_index_num_slots. Its address is the same as long as the
 * table lives. Rank 0 for a number that is none of its columns. */
SOK_EXPORT sok_tensor sok_dynamic_table_column(const sok_dynamic_table* table, int32_t column);

/* Memory that the index and the columns have, in bytes: all that is backed of their ranges (sok/reserved_range.h), on
 * the CPU also where nothing has touched it yet; of these, bytes in the host's memory while the table is a device's. 0
 * for NULL. */
SOK_EXPORT int64_t sok_dynamic_table_bytes(const sok_dynamic_table* table);
SOK_EXPORT int64_t sok_dynamic_table_host_bytes(const sok_dynamic_table* table);

/* Rows by key, also of keys that the table does not hold, which have their initial values. Changes nothing.
 *   keys  [n] SOK_INT32 or SOK_INT64
 *   rows  out [n, dimension], dtype of the rows */
SOK_EXPORT int sok_dynamic_table_read(const sok_context* context, const sok_dynamic_table* table, sok_tensor keys,
                                      sok_tensor rows);

/* Rows of keys that the table holds afterwards, as where sok_locate inserts them (SOK_LOCATE_BESIDE), and the rows that
 * it gave up. These are not asked for where evicted_keys and evicted_rows are SOK_NO_TENSOR and num_evicted is NULL.
 *   keys          [n] SOK_INT32 or SOK_INT64
 *   rows          out [n, dimension], dtype of the rows
 *   evicted_keys  out [n] SOK_INT64, evicted_rows: out [n, dimension], dtype of the rows: the first *num_evicted are
 *                 valid
 *   num_evicted   host
 * On CUDA it waits for the stream where the table evicts and it is asked what.
 * Errors: as sok_locate. */
SOK_EXPORT int sok_dynamic_table_read_and_evict(const sok_context* context, sok_dynamic_table* table, sok_tensor keys,
                                                sok_tensor rows, sok_tensor evicted_keys, sok_tensor evicted_rows,
                                                int64_t* num_evicted);

#ifdef __cplusplus
}
#endif
#endif /* SOK_DYNAMIC_TABLE_H_ */
