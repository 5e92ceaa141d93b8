/* SPDX-License-Identifier: Apache-2.0 */
/* How a call runs: its device and stream, where temporary memory comes from, and which threads do the work. */
#ifndef SOK_CONTEXT_H_
#define SOK_CONTEXT_H_

#include "sok/error_record.h"
#include "sok/export.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Temporary memory. `allocate` returns `bytes` (> 0) of memory on the context's device, aligned to 64 bytes on the CPU
 * and 256 on CUDA, or NULL when there is none. On CUDA memory is handed out and reused in stream order, so `release`
 * may be called as soon as the work that uses it is enqueued. Each is called only from the thread that made the call,
 * and each allocation is released before the call returns. NULL functions: the library's own (aligned_alloc,
 * cudaMallocAsync). */
typedef struct sok_allocator {
  void* opaque; /* passed back; owned by the caller */
  void* (*allocate)(void* opaque, size_t bytes);
  void (*release)(void* opaque, void* memory);
} sok_allocator;

/* Fork and join on the CPU. `run` calls body(argument, worker) once for each worker in [0, num_workers), on any
 * threads, one after another if need be, and returns when all have returned. It may use the calling thread and must not
 * throw. NULL `run`: the calling thread does all the work. */
typedef struct sok_executor {
  void* opaque;
  int32_t num_workers; /* >= 1 */
  int32_t reserved;
  void (*run)(void* opaque, int32_t num_workers, void (*body)(void* argument, int32_t worker), void* argument);
} sok_executor;

/* The execution context of one call. CPU calls return when the work is done. CUDA calls enqueue on `stream` and return
 * without waiting for it, except where a function says that it blocks and where `errors` is NULL. One context may be
 * used by one thread at a time. */
typedef struct sok_context {
  size_t struct_size; /* sizeof(sok_context); lets later versions add fields */
  sok_device device;
  void* stream; /* cudaStream_t; ignored on the CPU */
  sok_allocator allocator;
  sok_executor executor; /* ignored on CUDA */
  uint32_t flags;        /* 0: there are none */
  /* Where CUDA calls report bad contents later; NULL: they wait and report at once. Unused on the CPU. A caller whose
   * struct_size ends before this field has none. */
  sok_error_record* errors;
} sok_context;

#define SOK_CONTEXT_INIT {sizeof(sok_context), {SOK_CPU, 0}, NULL, {NULL, NULL, NULL}, {NULL, 1, 0, NULL}, 0u, NULL}

/* A pool of threads for callers that have none of their own (the ctypes binding, C programs). */
typedef struct sok_thread_pool sok_thread_pool;

/* Makes a pool that runs `num_threads` workers at once, the caller's thread being one of them: num_threads - 1 threads
 * are started at the first use. 0: one for each CPU this process may run on. The caller owns *pool.
 * Errors: SOK_INVALID_ARGUMENT (pool NULL, num_threads < 0), SOK_RESOURCE_EXHAUSTED. */
SOK_EXPORT int sok_thread_pool_create(int32_t num_threads, sok_thread_pool** pool);

/* Joins the threads and frees the pool; NULL is allowed. No call may be using it. Blocks until the threads have
 * ended. */
SOK_EXPORT int sok_thread_pool_destroy(sok_thread_pool* pool);

/* Writes to *executor one that runs on `pool`; it may be shared by threads (their calls take turns) and is valid as
 * long as the pool. After fork() the child's first use starts threads of its own. */
SOK_EXPORT int sok_thread_pool_executor(sok_thread_pool* pool, sok_executor* executor);

#ifdef __cplusplus
}
#endif
#endif /* SOK_CONTEXT_H_ */
