/* SPDX-License-Identifier: Apache-2.0 */
/* Errors that a CUDA device finds while it works: keys, slots and row splits are read there, after the call has
 * returned.
 *
 * A record serves a device, for all of its streams. It goes into sok_context.errors of each call of a step. The first
 * call that finds something wrong writes one of the things that are wrong there to it; from then on, until the record
 * is checked, sok_apply and sok_assign with this record change nothing. The other stages go on, never read or write out
 * of bounds, and leave undefined outputs. The caller checks the record before it uses the tables again (at the end of a
 * step, at the next step's exchange of sizes).
 *
 * A call on a CUDA device without a record waits for the stream instead and reports errors at once, as the CPU does.
 * Such a call cannot be captured in a CUDA graph; one with a record can. */
#ifndef SOK_ERROR_RECORD_H_
#define SOK_ERROR_RECORD_H_

#include "sok/export.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sok_context sok_context;

typedef struct sok_error_record sok_error_record;

/* Makes an empty record in host memory that `device` can write to; the caller owns *record. Blocks; starts CUDA on the
 * device. Errors: SOK_INVALID_ARGUMENT (not a CUDA device of this host), SOK_UNIMPLEMENTED (no CUDA in this build),
 * SOK_RESOURCE_EXHAUSTED. */
SOK_EXPORT int sok_error_record_create(sok_device device, sok_error_record** record);

/* Frees it; NULL is allowed. No work that was given the record may be pending. */
SOK_EXPORT int sok_error_record_destroy(sok_error_record* record);

/* Returns SOK_OK when the record is empty, without waiting: it sees what the device has reported so far, which is
 * everything once the stream has been waited for. Otherwise waits for the device, so that all that was enqueued before
 * has met the full record, empties it, and returns the status of what was found, with a message that names the table,
 * and this rank where a table of several ranks is full. (The record remembers the names of the tables of all calls that
 * were given it, and the rank of those that locate.) While a stream of the device is being captured in a CUDA graph it
 * is not waited for and the record stays full. Any thread; one of them gets the error. */
SOK_EXPORT int sok_error_record_check(sok_error_record* record);

/* 1 when nothing was found, or record is NULL; else 0. Neither empties the record nor waits: who has to wait for work
 * that must still meet the full record looks here first. Any thread. */
SOK_EXPORT int sok_error_record_is_empty(const sok_error_record* record);

/* Lets the stream carry the news, for example to the other ranks with the counts of an exchange.
 *   flags  out [n] or [n, 1] SOK_INT64: 1 in every element when context->errors is not empty at that point of the
 *          stream, else 0; row_stride may be set
 * Enqueues and does not wait, allocates nothing, may be captured in a CUDA graph. Without a record (and on the CPU,
 * where calls report at once) every element becomes 0. Does not empty the record. */
SOK_EXPORT int sok_error_record_flag(const sok_context* context, sok_tensor flags);

#ifdef __cplusplus
}
#endif
#endif /* SOK_ERROR_RECORD_H_ */
