// SPDX-License-Identifier: Apache-2.0
#include "cuda/device.h"

#include <algorithm>
#include <cstring>

#include "cuda/check.h"

#define SOK_STRINGIFY_(x) #x
#define SOK_STRINGIFY(x) SOK_STRINGIFY_(x)

namespace sok::cuda {

int32_t device_count() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver || error == cudaErrorStubLibrary) {
    cudaGetLastError();
    return 0;
  }
  SOK_CUDA_CHECK(error);
  return count;
}

void get_device_properties(int32_t index, sok_device_properties* properties) {
  // Not cudaMemGetInfo for the memory: that would make a context.
  cudaDeviceProp found;
  SOK_CUDA_CHECK(cudaGetDeviceProperties(&found, index));
  const size_t size = std::min(std::strlen(found.name), sizeof(properties->name) - 1);
  std::memcpy(properties->name, found.name, size);
  properties->name[size] = '\0';
  properties->total_memory = static_cast<int64_t>(found.totalGlobalMem);
  properties->compute_capability = 10 * found.major + found.minor;
  properties->multiprocessors = found.multiProcessorCount;
}

const char* build_info() {
  return "CUDA " SOK_STRINGIFY(__CUDACC_VER_MAJOR__) "." SOK_STRINGIFY(__CUDACC_VER_MINOR__) ", sm " SOK_CUDA_ARCHS;
}

}  // namespace sok::cuda
