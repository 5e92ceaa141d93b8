// SPDX-License-Identifier: Apache-2.0
// One call on a CUDA device: its device made current, its stream, its temporary memory.
#ifndef SOK_CUDA_CONTEXT_H_
#define SOK_CUDA_CONTEXT_H_

#include <cuda_runtime_api.h>

#include "sok/context.h"

namespace sok::cuda {

// Lives on the stack of an entry function, by the calling thread only. Makes the context's device current and gives the
// thread its own back at the end. Neither blocks nor waits for the stream.
class Scope {
 public:
  // Throws Error(SOK_INVALID_ARGUMENT) when the context names no CUDA device of this host.
  explicit Scope(const sok_context& context);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  cudaStream_t stream() const { return stream_; }

  // The context with functions in `allocator`: the caller's, or, where it gave none, cudaMallocAsync and cudaFreeAsync
  // on the stream. Memory that was released is used again by what is enqueued later, so nothing waits.
  const sok_context& context() const { return context_; }

 private:
  sok_context context_;
  cudaStream_t stream_;
  int previous_device_ = 0;
};

}  // namespace sok::cuda

#endif  // SOK_CUDA_CONTEXT_H_
