// SPDX-License-Identifier: Apache-2.0
// Errors of the CUDA runtime as sok::Error.
#ifndef SOK_CUDA_CHECK_H_
#define SOK_CUDA_CHECK_H_

#include <cuda_runtime_api.h>

#include "common/status.h"

namespace sok::cuda {

inline sok_status status_of(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return SOK_OK;
    case cudaErrorMemoryAllocation:
      return SOK_RESOURCE_EXHAUSTED;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
    case cudaErrorInitializationError:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorSystemNotReady:
    case cudaErrorDevicesUnavailable:
      return SOK_UNAVAILABLE;
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorNotSupported:
      return SOK_UNIMPLEMENTED;
    default:
      return SOK_INTERNAL;
  }
}

// Throws for an error, and takes it out of the runtime's memory so that the framework does not meet it later.
inline void check(cudaError_t error, const char* expression, const char* file, int line) {
  if (error == cudaSuccess) [[likely]]
    return;
  cudaGetLastError();
  fail(status_of(error), "CUDA: ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ") from ", expression,
       " at ", file, ":", line);
}

}  // namespace sok::cuda

#define SOK_CUDA_CHECK(expression) ::sok::cuda::check((expression), #expression, __FILE_NAME__, __LINE__)

#endif  // SOK_CUDA_CHECK_H_
