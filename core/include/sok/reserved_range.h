/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that grows and shrinks in place: what the columns of a dynamic table lie in.
 *
 * A range has addresses for all that it may ever hold from the day it is made, and memory behind the first of them: the
 * backed bytes. Growing puts memory behind more addresses and shrinking takes it away from the last ones, so nothing
 * that stays is copied, and a pointer into it holds until the range is destroyed. To kernels it is one array.
 *
 * How it grows. Memory comes in chunks of whole pages (4 KiB on most CPUs, 2 MiB on NVIDIA's GPUs). A chunk is an
 * eighth of what is backed, at least a page and at most 1 GiB, on the CPU 2 MiB; where there is no memory for that, it
 * is what the call lacks. So a range that grows row by row asks the system for memory once in an eighth of its size or
 * once in 2 MiB, and that much at most is backed and not yet asked for, besides a page. On the CPU, which gives back
 * single pages, a chunk is at least what the call lacks, chunks of a range of 16 MiB and more end where huge pages of 2
 * MiB end, and a page takes no memory before it is touched. On an H200 a chunk takes 36 to 83 microseconds, whatever
 * its size, and every range that is not empty takes 2 MiB.
 *
 * Two memories. On CUDA a range may begin in the device's memory and go on in page-locked memory of the host, which
 * the device reads and writes over PCIe at addresses of the same array: some 48 million rows a second, wherever they
 * are, on an H200. A chunk of 1 GiB of that takes a quarter of a second.
 *
 * A range is used by one thread at a time; the functions that only read it (data, reserved_bytes, backed_bytes) and
 * work on what is backed may run beside anything but shrinking. */
#ifndef SOK_RESERVED_RANGE_H_
#define SOK_RESERVED_RANGE_H_

#include "sok/context.h"
#include "sok/export.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sok_reserved_range sok_reserved_range;

typedef struct sok_reserved_range_config {
  size_t struct_size; /* sizeof(sok_reserved_range_config) */
  sok_device device;  /* where the memory is to be */
  int64_t bytes;      /* the most it may ever hold, > 0; rounded up to whole pages. Addresses are plenty: on a 64-bit
                       * host a range may well have many times what the device has memory for */
  const char* name;   /* UTF-8, what it is called in messages, copied; NULL: "range" */
  /* On CUDA: how many bytes from its start on are in the device's memory, rounded up to whole pages; what is beyond is
   * in the host's. 0: all. The CPU has one memory alone. */
  int64_t device_bytes;
} sok_reserved_range_config;

#define SOK_RESERVED_RANGE_CONFIG_INIT {sizeof(sok_reserved_range_config), {SOK_CPU, 0}, 0, NULL, 0}

/* Reserves the addresses; nothing is backed. The caller owns *range. On CUDA it starts CUDA on the device.
 * Errors: SOK_INVALID_ARGUMENT (no such device, bytes <= 0), SOK_RESOURCE_EXHAUSTED (so many addresses are not free),
 * SOK_UNIMPLEMENTED (no CUDA in this build, a device without virtual memory management), SOK_UNAVAILABLE. */
SOK_EXPORT int sok_reserved_range_create(const sok_reserved_range_config* config, sok_reserved_range** range);

/* Gives memory and addresses back; NULL is allowed. No work that uses them may be pending. */
SOK_EXPORT int sok_reserved_range_destroy(sok_reserved_range* range);

/* Where it begins, at the start of a page; the same as long as it lives. NULL for NULL. */
SOK_EXPORT void* sok_reserved_range_data(const sok_reserved_range* range);

/* Bytes that it has addresses for; bytes that have memory behind them, which may be read and written; of these, bytes
 * in the host's memory while the range is a device's. 0 for NULL. */
SOK_EXPORT int64_t sok_reserved_range_reserved_bytes(const sok_reserved_range* range);
SOK_EXPORT int64_t sok_reserved_range_backed_bytes(const sok_reserved_range* range);
SOK_EXPORT int64_t sok_reserved_range_host_bytes(const sok_reserved_range* range);

/* Backs at least the first `bytes`; does nothing where they are. What was backed before keeps its contents. Bytes that
 * become backed are 0 on the CPU and have no defined value on CUDA. Enqueues nothing and waits for no stream: kernels
 * that use what is backed may be running.
 * Errors: SOK_RESOURCE_EXHAUSTED when the device has no memory for it, or more than the reserved bytes are asked for;
 * then as many bytes are backed as before, and what this call took has been given back. SOK_INVALID_ARGUMENT.
 * SOK_UNIMPLEMENTED beyond device_bytes, likewise, where the device's driver cannot put memory of the host there. */
SOK_EXPORT int sok_reserved_range_grow(sok_reserved_range* range, int64_t bytes);

/* Gives memory behind the first `bytes` back to the system, and keeps the first `bytes` with their contents. On the CPU
 * it keeps whole pages, on CUDA whole chunks: a chunk that `bytes` lies in stays, unless `bytes` is its start. So an
 * eighth of `bytes` or a page, whichever is more, may stay besides.
 *
 * `context` is one of the range's device. On CUDA the call blocks until what was enqueued on context->stream before is
 * done, and then takes the memory; work on other streams that uses the part in question must be ordered before that by
 * the caller. Where no more than `bytes` are backed it does nothing.
 * Errors: SOK_INVALID_ARGUMENT; SOK_FAILED_PRECONDITION where the stream is being captured; as the stream's work
 * failed. */
SOK_EXPORT int sok_reserved_range_shrink(const sok_context* context, sok_reserved_range* range, int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif /* SOK_RESERVED_RANGE_H_ */
