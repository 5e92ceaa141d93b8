/* SPDX-License-Identifier: Apache-2.0 */
/* Memory on a GPU for batches that come from the host while the GPU computes, for frameworks whose own copies wait for
 * the steps that were enqueued before.
 *
 * Pieces are kept and used again. A piece is given out once nothing that was enqueued when it was given back is
 * pending. Four pieces that a batch fits into are pending at most before a copy waits for the first of them, on the
 * device; until then more memory is allocated.
 *
 * Threads: functions may be called from any thread. Copies are enqueued in turns and waited for side by side. */
#ifndef SOK_BATCH_MEMORY_H_
#define SOK_BATCH_MEMORY_H_

#include "sok/export.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sok_batch_memory sok_batch_memory;

/* Makes an empty one, with a stream of its own. The caller owns *memory.
 * Errors: SOK_INVALID_ARGUMENT (no such CUDA device), SOK_UNIMPLEMENTED (no CUDA in this build). */
SOK_EXPORT int sok_batch_memory_create(sok_device device, sok_batch_memory** memory);

/* Copies from the host and blocks until that is done. From page-locked memory nothing else of the process waits.
 *   host   [bytes], may be changed after the call
 *   bytes  > 0
 *   data   out: [bytes] on the device, aligned as cudaMalloc does, the caller's until sok_batch_memory_release
 * Errors: SOK_RESOURCE_EXHAUSTED (no memory on the device), SOK_INVALID_ARGUMENT. */
SOK_EXPORT int sok_batch_memory_fill(sok_batch_memory* memory, const void* host, int64_t bytes, void** data);

/* Gives a piece back: what is enqueued on `stream` (a cudaStream_t) by now may still use it. Does not wait.
 * Errors: SOK_INVALID_ARGUMENT (not a piece of this memory that is given out). */
SOK_EXPORT int sok_batch_memory_release(sok_batch_memory* memory, void* data, void* stream);

/* Waits for what was enqueued when pieces were given back, and frees all of them; NULL is allowed. No piece may be
 * given out then. */
SOK_EXPORT int sok_batch_memory_destroy(sok_batch_memory* memory);

#ifdef __cplusplus
}
#endif
#endif /* SOK_BATCH_MEMORY_H_ */
