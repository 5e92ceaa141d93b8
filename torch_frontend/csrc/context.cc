// SPDX-License-Identifier: Apache-2.0
#include "context.h"

#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/version.h>

#include "error_records.h"

namespace sok_torch {
namespace {

// No exception may cross the C interface: out of memory is NULL there.
void* allocate(void* opaque, size_t bytes) {
  try {
    return static_cast<c10::Allocator*>(opaque)->raw_allocate(bytes);
  } catch (...) {
    return nullptr;
  }
}

void release(void* opaque, void* memory) { static_cast<c10::Allocator*>(opaque)->raw_deallocate(memory); }

void run(void* /*opaque*/, int32_t num_workers, void (*body)(void* argument, int32_t worker), void* argument) {
  at::parallel_for(0, num_workers, 1, [=](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) body(argument, static_cast<int32_t>(worker));
  });
}

// Stream::native_handle came after PyTorch 2.9.
template <typename Stream>
void* native_handle(const Stream& stream) {
  if constexpr (requires { stream.native_handle(); }) {
    return stream.native_handle();
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "Tables on a GPU need a newer PyTorch than ", TORCH_VERSION, ".");
    return nullptr;
  }
}

}  // namespace

Context::Context(c10::Device device, Earlier earlier) : guard_(device), context_ SOK_CONTEXT_INIT {
  c10::Allocator* allocator = c10::GetAllocator(device.type());
  context_.allocator = {allocator, allocate, release};
  if (device.is_cuda()) {
    if (earlier == Earlier::kRaised) check_error_record(device.index());
    context_.device = {SOK_CUDA, device.index()};
    context_.errors = error_record(device.index());
    context_.stream = native_handle(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(device.is_cpu(), "Tables live on CPU or CUDA devices, not on ", device, ".");
    context_.executor = {nullptr, at::in_parallel_region() ? 1 : at::get_num_threads(), 0, run};
  }
}

}  // namespace sok_torch
