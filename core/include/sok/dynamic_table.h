/* SPDX-License-Identifier: Apache-2.0 */
/* A dynamic table: an index (sok/hash_index.h) and the columns over its slots, which grow in place, together.
 *
 * Column 0 is the rows; others are optimizer states, stamps and whatever else there is one of for each slot. Every
 * column is one reserved range (sok/reserved_range.h), so its address stays while it grows. A slot that a key gets, new
 * or used before by another key, has its initial values in all columns: of the rows those of (seed, key, column), of
 * the others one number.
 *
 * A table is used like its index: calls that find, read and export may run beside each other; a call that inserts,
 * erases or adds a column runs alone. In this version a table is on the CPU. */
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

typedef struct sok_dynamic_table_config {
  size_t struct_size;          /* sizeof(sok_dynamic_table_config) */
  sok_hash_index_config index; /* device, capacity, initial_rows and name are also the table's */
  int64_t dimension;           /* elements a row, >= 1 */
  int32_t dtype;               /* of the rows: SOK_FLOAT32, SOK_FLOAT16 or SOK_BFLOAT16 */
  sok_initializer initializer; /* of the rows */
} sok_dynamic_table_config;

#define SOK_DYNAMIC_TABLE_CONFIG_INIT \
  {sizeof(sok_dynamic_table_config), SOK_HASH_INDEX_CONFIG_INIT, 0, SOK_FLOAT32, SOK_INITIALIZER_INIT}

/* Makes an empty table; the caller owns *table.
 * Errors: as sok_hash_index_create; SOK_RESOURCE_EXHAUSTED also where there are no addresses for the columns. */
SOK_EXPORT int sok_dynamic_table_create(const sok_dynamic_table_config* config, sok_dynamic_table** table);

/* Gives its memory back; NULL is allowed. No call or work that uses it may be pending. */
SOK_EXPORT int sok_dynamic_table_destroy(sok_dynamic_table* table);

/* The table as sok_locate takes it: without SOK_LOCATE_INSERT it finds, and with it inserts what it does not find, and
 * the slots are ready to be used in every column. Errors of inserting are those of sok_hash_index_find_or_insert, also
 * where a column cannot grow; the table holds what it held then. It belongs to the table and lives as long. */
SOK_EXPORT const sok_index* sok_dynamic_table_as_index(const sok_dynamic_table* table);

/* The index itself, to find, export, reserve and count. To insert, erase and clear is for the table. */
SOK_EXPORT sok_hash_index* sok_dynamic_table_hash_index(const sok_dynamic_table* table);

/* How often sok_locate has inserted into it and keys were erased: the generation of the slots that the last sok_locate
 * gave, for sok_gradient. A table takes INT32_MAX - 1 generations, then inserting is SOK_RESOURCE_EXHAUSTED. */
SOK_EXPORT int64_t sok_dynamic_table_generation(const sok_dynamic_table* table);

/* Column 0 and the generations of its slots, as the stages after sok_locate take them, with the slots of now. */
SOK_EXPORT sok_columns sok_dynamic_table_columns(const sok_dynamic_table* table);

/* Erases keys, as sok_hash_index_erase does. A gradient for a row of them is refused from now on.
 *   keys   [n] SOK_INT32 or SOK_INT64
 *   slots  [n] SOK_INT64, out: those that the keys had, or -1 */
SOK_EXPORT int sok_dynamic_table_erase(const sok_context* context, sok_dynamic_table* table, sok_tensor keys,
                                       sok_tensor slots);

/* Erases all keys, and keeps the memory. */
SOK_EXPORT int sok_dynamic_table_clear(const sok_context* context, sok_dynamic_table* table);

/* Adds a column, with `initial` at every slot there is.
 *   dtype    SOK_FLOAT32 or SOK_INT64
 *   width    elements a slot, >= 1
 *   initial  rounded to the dtype; 0 for SOK_INT64
 *   *column  its number, from 1 on
 * Errors: SOK_INVALID_ARGUMENT, SOK_RESOURCE_EXHAUSTED; no column is added then. */
SOK_EXPORT int sok_dynamic_table_add_column(const sok_context* context, sok_dynamic_table* table, int32_t dtype,
                                            int64_t width, double initial, int32_t* column);

/* [num_slots, width] of a column, num_slots as of sok_hash_index_num_slots. Its address is the same as long as the
 * table lives, its size is that of now. Rank 0 for a number that is none of its columns. */
SOK_EXPORT sok_tensor sok_dynamic_table_column(const sok_dynamic_table* table, int32_t column);

/* Memory that the index and the columns have, in bytes. 0 for NULL. */
SOK_EXPORT int64_t sok_dynamic_table_bytes(const sok_dynamic_table* table);

/* Rows by key, also of keys that the table does not hold, which have their initial values. Changes nothing.
 *   keys  [n] SOK_INT32 or SOK_INT64
 *   rows  out [n, dimension], dtype of the rows */
SOK_EXPORT int sok_dynamic_table_read(const sok_context* context, const sok_dynamic_table* table, sok_tensor keys,
                                      sok_tensor rows);

#ifdef __cplusplus
}
#endif
#endif /* SOK_DYNAMIC_TABLE_H_ */
