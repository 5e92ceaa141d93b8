// SPDX-License-Identifier: Apache-2.0
#include "cuda/context.h"

#include <algorithm>
#include <cstring>

#include "cuda/check.h"
#include "cuda/device.h"

namespace sok::cuda {
namespace {

// `opaque` is the stream itself: nothing to own, nothing to free.
void* allocate_on_stream(void* opaque, size_t bytes) {
  void* memory = nullptr;
  if (cudaMallocAsync(&memory, bytes, static_cast<cudaStream_t>(opaque)) == cudaSuccess) return memory;
  cudaGetLastError();
  return nullptr;
}

void release_on_stream(void* opaque, void* memory) {
  // Runs in destructors: an error here (a kernel failed earlier) is met by the next call that checks.
  cudaFreeAsync(memory, static_cast<cudaStream_t>(opaque));
}

}  // namespace

Scope::Scope(const sok_context& context)
    : context_ SOK_CONTEXT_INIT, stream_(static_cast<cudaStream_t>(context.stream)) {
  // An older caller's struct ends before the newest fields.
  std::memcpy(static_cast<void*>(&context_), &context, std::min(context.struct_size, sizeof(context_)));
  const int32_t index = context.device.index;
  SOK_CHECK(context.device.type == SOK_CUDA && index >= 0 && index < device_count(), "no CUDA device ", index,
            "; this host has ", device_count());
  SOK_CUDA_CHECK(cudaGetDevice(&previous_device_));
  if (index != previous_device_) SOK_CUDA_CHECK(cudaSetDevice(index));
  if (context_.allocator.allocate == nullptr)
    context_.allocator = {context.stream, allocate_on_stream, release_on_stream};
}

Scope::~Scope() {
  if (context_.device.index != previous_device_) cudaSetDevice(previous_device_);
}

}  // namespace sok::cuda
