// SPDX-License-Identifier: Apache-2.0
#include "cuda/error_record.h"

#include <new>

#include "cuda/check.h"
#include "cuda/context.h"
#include "cuda/launch.h"
#include "cuda/report.cuh"

namespace sok::cuda {
namespace {

__global__ void flag_kernel(const sok_error_record* errors, int64_t* flags, int64_t n, int64_t stride) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) flags[i * stride] = errors != nullptr && is_recorded(errors) ? 1 : 0;
}

}  // namespace

sok_error_record* create_error_record(int32_t device) {
  sok_context context = SOK_CONTEXT_INIT;
  context.device = {SOK_CUDA, device};
  const Scope scope(context);
  void* memory = nullptr;
  SOK_CUDA_CHECK(cudaHostAlloc(&memory, sizeof(sok_error_record), cudaHostAllocMapped | cudaHostAllocPortable));
  auto* record = new (memory) sok_error_record{};
  record->keeper = new RecordKeeper(device);
  return record;
}

void destroy_error_record(sok_error_record* record) {
  delete record->keeper;
  SOK_CUDA_CHECK(cudaFreeHost(record));
}

bool wait_for_device(int32_t device) {
  sok_context context = SOK_CONTEXT_INIT;
  context.device = {SOK_CUDA, device};
  const Scope scope(context);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // does not disturb what another thread captures
  SOK_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  const cudaError_t status = cudaDeviceSynchronize();
  SOK_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  if (status == cudaErrorStreamCaptureUnsupported) {
    cudaGetLastError();
    return false;
  }
  SOK_CUDA_CHECK(status);
  return true;
}

void flag_errors(const sok_context& context, int64_t* flags, int64_t n, int64_t stride) {
  const Scope scope(context);
  SOK_LAUNCH(flag_kernel, ceil_div(n, kThreads), scope.stream(), scope.context().errors, flags, n, stride);
}

}  // namespace sok::cuda
