// SPDX-License-Identifier: Apache-2.0
#include "cuda/error_record.h"

#include <new>

#include "cuda/check.h"
#include "cuda/context.h"

namespace sok::cuda {

sok_error_record* create_error_record(int32_t device) {
  sok_context context = SOK_CONTEXT_INIT;
  context.device = {SOK_CUDA, device};
  const Scope scope(context);
  void* memory = nullptr;
  SOK_CUDA_CHECK(cudaHostAlloc(&memory, sizeof(sok_error_record), cudaHostAllocMapped | cudaHostAllocPortable));
  return new (memory) sok_error_record{};
}

void destroy_error_record(sok_error_record* record) { SOK_CUDA_CHECK(cudaFreeHost(record)); }

}  // namespace sok::cuda
