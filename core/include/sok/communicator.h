/* SPDX-License-Identifier: Apache-2.0 */
/* The exchange between GPUs: all-to-all with counts over NCCL, which is opened at run time (libnccl.so.2) and never
 * linked. Each rank is one process with one GPU of its own.
 *
 * Which NCCL: the library that SOK_NCCL_LIBRARY names; else the libnccl.so.2 that is in the process already (the
 * framework's own, so that there is one NCCL and not two); else what the dynamic linker finds by that name. It must be
 * 2.17 or newer.
 *
 * A peer that dies: a thread of the communicator looks at exchanges that are pending for more than a few seconds. When
 * NCCL reports an error, when a peer's process on this host has ended, or when SOK_NCCL_TIMEOUT seconds (1800; 0: no
 * limit) have passed, it ends the exchange on this rank and the communicator has failed: from then on every function
 * returns SOK_UNAVAILABLE and names the reason and the rank. What the ended exchange was to write is undefined; the
 * error records of the contexts of pending exchanges are set, so that sok_apply and sok_assign with them change
 * nothing. A peer that is merely late, however long, is no error before SOK_NCCL_TIMEOUT. Peers on other hosts are
 * watched by NCCL itself and by the time limit.
 *
 * Beside other communicators of the process (the framework's): kernels of NCCL wait on the device for their peers, so
 * two communicators whose exchanges run in one order on one rank and in the other order on another rank can block each
 * other when they cannot run side by side. Against that, all connections and all memory are made by
 * sok_communicator_create; later calls neither allocate nor wait for the device, and occupy a
 * bounded part of it (at most 32 blocks), so that they run beside others. The caller must see to two things: that no
 * other communicator is created or used on the device while sok_communicator_create runs, and that this communicator's
 * exchanges come in the same order on all ranks. Where the order relative to the other communicators is the same on all
 * ranks as well (one thread issues both), NCCL_LAUNCH_ORDER_IMPLICIT=1 makes NCCL 2.26 and newer keep that order on the
 * device too. It must not be set where another library issues from a thread of its own, as Horovod does.
 *
 * Threads: functions may be called from any thread; exchanges of one communicator take turns. After fork() a
 * communicator belongs to the parent: in the child its functions return SOK_FAILED_PRECONDITION and destroy does
 * nothing. A process may end without destroying its communicators. */
#ifndef SOK_COMMUNICATOR_H_
#define SOK_COMMUNICATOR_H_

#include "sok/context.h"
#include "sok/export.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sok_nccl_properties {
  size_t struct_size; /* sizeof(sok_nccl_properties), set by the caller */
  int32_t version;    /* 10000 * major + 100 * minor + patch */
  int32_t reserved;
  char path[1024]; /* of the library's file */
} sok_nccl_properties;

/* Opens NCCL at the first call and fills *properties. Starts no CUDA. Errors: SOK_UNAVAILABLE (no library, one that is
 * too old or lacks a function; the message says what was tried), SOK_UNIMPLEMENTED (no CUDA in this build). */
SOK_EXPORT int sok_nccl_get_properties(sok_nccl_properties* properties);

/* Writes to uuid[0..63] a text that this GPU has and no other: ranks whose texts are equal share a GPU, which NCCL
 * refuses. Makes no CUDA context. Errors: as sok_device_get_properties. */
SOK_EXPORT int sok_device_get_uuid(sok_device device, char* uuid);

#define SOK_COMMUNICATOR_ID_SIZE 136

/* What the ranks of one communicator have in common: made by one of them, given to the others as it is. */
typedef struct sok_communicator_id {
  unsigned char bytes[SOK_COMMUNICATOR_ID_SIZE];
} sok_communicator_id;

typedef struct sok_communicator sok_communicator;

/* Makes the id of a new communicator. Errors: as sok_nccl_get_properties. */
SOK_EXPORT int sok_communicator_id_create(sok_communicator_id* id);

/* Joins the communicator of `id`, on all ranks together; each names its own CUDA device. Blocks until all ranks are
 * connected, at most `timeout` seconds (0: 300). The caller owns *communicator.
 * Errors: SOK_UNAVAILABLE (NCCL failed or ranks did not come in time; a thread that waits in NCCL may stay behind until
 * the process ends), SOK_INVALID_ARGUMENT (a rank outside [0, num_ranks), no such device, an id that is none, another
 * version of NCCL than that of the rank that made the id). */
SOK_EXPORT int sok_communicator_create(sok_device device, const sok_communicator_id* id, int32_t num_ranks,
                                       int32_t rank, double timeout, sok_communicator** communicator);

/* The number of ranks; 0 for NULL. Any thread, any process. */
SOK_EXPORT int32_t sok_communicator_num_ranks(const sok_communicator* communicator);

/* Sends send_counts[r] consecutive elements of `send` to each rank r, in the order of ranks, and puts what comes into
 * `receive`, by source rank.
 *   context         of the communicator's device; the exchange is ordered by its stream. Its error record, if it has
 *                   one, must live until no exchange of the communicator is pending
 *   send            [n] of any dtype; on the device
 *   send_counts     [num_ranks] elements, on the host; n together
 *   receive         out [m] of the same dtype, apart from `send`; on the device
 *   receive_counts  [num_ranks] elements, on the host; m together. What rank r sends here, which is not checked: where
 *                   the counts of two ranks do not agree, the exchange never ends, or `receive` is undefined
 * All ranks call it, in the same order, with whatever counts, 0 included. Enqueues and does not wait. Cannot be
 * captured in a CUDA graph (SOK_FAILED_PRECONDITION), nor be called between the caller's own ncclGroupStart and
 * ncclGroupEnd. */
SOK_EXPORT int sok_all_to_all(const sok_context* context, sok_communicator* communicator, sok_tensor send,
                              const int64_t* send_counts, sok_tensor receive, const int64_t* receive_counts);

/* Tells each rank how much will come to it and whether this rank has failed, and learns the same from all: the one
 * place where a step on several ranks waits. A rank sends a row of k numbers to each rank. The last one is not 0 where
 * the sender has failed, and all ranks leave the step then; its other numbers mean nothing.
 *   context   of the communicator's device. Where its error record is not empty at that point of the stream, the last
 *             column is 1 whatever is given for it
 *   counts    [num_ranks, k] SOK_INT64, on the device: row r goes to rank r. k in [1, 2^20], the same on all ranks
 *   sent      out, host [num_ranks, k]: what this rank sent
 *   received  out, host [num_ranks, k]: row s came from rank s
 * All ranks call it, in the same order as their other exchanges. For each 4096 columns it enqueues one kernel, the
 * exchange and one copy, and waits for the context's stream alone, until a few seconds after the communicator has
 * failed even where something else on the stream never ends. Calls of one communicator take turns. It allocates
 * nothing. Errors, beside those of the arguments: as sok_all_to_all; what sok_communicator_check returns when the
 * stream has been waited for, and then the outputs are undefined. */
SOK_EXPORT int sok_swap_counts(const sok_context* context, sok_communicator* communicator, sok_tensor counts,
                               int64_t* sent, int64_t* received);

/* Tells all ranks whether this one has failed, before any of them changes a row: from then on the error record of each
 * is full where another rank has failed, so that its sok_apply changes nothing, and names that rank.
 *   context  of the communicator's device, with an error record: where that is not empty at that point of the stream,
 *            this rank has failed
 *   failed   1: it has failed in any case, and its own record need not say so; else 0
 * All ranks call it, in the same order as their other exchanges. Enqueues the exchange between two kernels; neither
 * waits nor allocates. Errors: as sok_all_to_all. */
SOK_EXPORT int sok_share_errors(const sok_context* context, sok_communicator* communicator, int32_t failed);

typedef enum sok_reduction {
  SOK_REDUCE_SUM = 0,
  SOK_REDUCE_MEAN = 1,
  SOK_REDUCE_MIN = 2,
  SOK_REDUCE_MAX = 3
} sok_reduction;

/* Makes the connections and the memory of sok_all_reduce, which NCCL has apart from those of exchanges, for each of its
 * algorithms. On all ranks together, before the first sok_all_reduce and while no other communicator is created or used
 * on the device; later calls do nothing. Blocks until it is done, at most 300 seconds.
 * Errors: SOK_UNAVAILABLE (the communicator has failed, or the ranks did not come in time). */
SOK_EXPORT int sok_communicator_prepare_all_reduce(sok_communicator* communicator);

/* Reduces arrays over the ranks, element by element; every rank gets the result.
 *   context      of the communicator's device; ordered by its stream. Its error record as for sok_all_to_all
 *   reduction    sok_reduction; SOK_REDUCE_MEAN of floating point alone
 *   num_arrays   in [0, 65536]
 *   send         host [num_arrays] of arrays [n_i], all of one dtype: float16, bfloat16, float32, float64, int32,
 *                int64, uint32, uint64 or uint8
 *   receive      host [num_arrays], out: arrays of the same sizes and dtype, each the very memory of its `send` or
 *                apart from all of them
 * All ranks call it with the same reduction, number, sizes and dtype, in the same order as their other exchanges; that
 * they agree is not checked. NCCL takes the arrays of a call together. Enqueues and does not wait. Sums are NCCL's:
 * equal on all ranks, in an order that depends on the number of ranks and on the size.
 * Errors: as sok_all_to_all; SOK_FAILED_PRECONDITION before sok_communicator_prepare_all_reduce. */
SOK_EXPORT int sok_all_reduce(const sok_context* context, sok_communicator* communicator, int32_t reduction,
                              int32_t num_arrays, const sok_tensor* send, const sok_tensor* receive);

/* SOK_OK as long as the communicator works, else SOK_UNAVAILABLE with the reason. Does not wait: an exchange is known
 * to have succeeded when its stream has been waited for and this returns SOK_OK then. */
SOK_EXPORT int sok_communicator_check(sok_communicator* communicator);

/* Ends pending exchanges on this rank and makes the communicator fail; the peers' exchanges with this rank do not end
 * by that. Calling it again does nothing. Blocks while NCCL frees what it holds. */
SOK_EXPORT int sok_communicator_abort(sok_communicator* communicator);

/* Waits for pending exchanges and frees the communicator; NULL is allowed. To be called on all ranks, each after its
 * last exchange; no other call may be using it. */
SOK_EXPORT int sok_communicator_destroy(sok_communicator* communicator);

#ifdef __cplusplus
}
#endif
#endif /* SOK_COMMUNICATOR_H_ */
