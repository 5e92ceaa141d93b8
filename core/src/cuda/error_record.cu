// SPDX-License-Identifier: Apache-2.0
#include "cuda/error_record.h"

#include <new>

#include "cuda/check.h"
#include "cuda/context.h"
#include "cuda/launch.h"

namespace sok::cuda {
namespace {

// `errors` lies in host memory: read past the caches, since a kernel of another stream may have written it.
__global__ void flag_kernel(const sok_error_record* errors, int64_t* flags, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) flags[i] = *static_cast<const volatile int32_t*>(&errors->fault) != 0 ? 1 : 0;
}

}  // namespace

sok_error_record* create_error_record(int32_t device) {
  sok_context context = SOK_CONTEXT_INIT;
  context.device = {SOK_CUDA, device};
  const Scope scope(context);
  void* memory = nullptr;
  SOK_CUDA_CHECK(cudaHostAlloc(&memory, sizeof(sok_error_record), cudaHostAllocMapped | cudaHostAllocPortable));
  auto* record = new (memory) sok_error_record{};
  record->names = new TableNames;
  return record;
}

void destroy_error_record(sok_error_record* record) {
  delete record->names;
  SOK_CUDA_CHECK(cudaFreeHost(record));
}

void flag_errors(const sok_context& context, int64_t* flags, int64_t n) {
  if (n == 0) return;
  const Scope scope(context);
  const sok_error_record* errors = scope.context().errors;
  if (errors == nullptr) {
    SOK_CUDA_CHECK(cudaMemsetAsync(flags, 0, static_cast<size_t>(n) * sizeof(int64_t), scope.stream()));
    return;
  }
  SOK_LAUNCH(flag_kernel, ceil_div(n, kThreads), scope.stream(), errors, flags, n);
}

}  // namespace sok::cuda
