// SPDX-License-Identifier: Apache-2.0
#include "gpu.h"

#include <algorithm>
#include <cstring>

#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/device_base.h"

#if defined(SOK_WITH_CUDA)
#include "xla/stream_executor/device_memory.h"
#include "xla/stream_executor/stream.h"
#include "xla/stream_executor/stream_executor.h"
#endif

namespace sok::tf {
namespace {

::tensorflow::Device* DeviceOf(OpKernelContext* ctx) { return static_cast<::tensorflow::Device*>(ctx->device()); }

}  // namespace

#if defined(SOK_WITH_CUDA)

bool OnGpu(OpKernelContext* ctx) {
  const ::tensorflow::DeviceContext* context = ctx->op_device_context();
  return context != nullptr && context->stream() != nullptr;
}

int GpuIndex(OpKernelContext* ctx) { return ctx->device()->tensorflow_accelerator_device_info()->gpu_id; }

void* GpuStream(OpKernelContext* ctx) { return ctx->op_device_context()->stream()->platform_specific_handle().stream; }

absl::Status WaitForGpu(OpKernelContext* ctx) { return ctx->op_device_context()->stream()->BlockHostUntilDone(); }

Gpu::Gpu(OpKernelContext* ctx) : executor_(OnGpu(ctx) ? ctx->op_device_context()->stream()->parent() : nullptr) {}

void Gpu::Wait() const {
  if (executor_ != nullptr) executor_->SynchronizeAllActivity();
}

#else

bool OnGpu(OpKernelContext*) { return false; }

int GpuIndex(OpKernelContext*) { return -1; }

void* GpuStream(OpKernelContext*) { return nullptr; }

absl::Status WaitForGpu(OpKernelContext*) { return absl::OkStatus(); }

Gpu::Gpu(OpKernelContext*) : executor_(nullptr) {}

void Gpu::Wait() const {}

#endif

absl::Status CopyOnDevice([[maybe_unused]] OpKernelContext* ctx, const Tensor& from, Tensor* to) {
  if (from.TotalBytes() == 0) return absl::OkStatus();
#if defined(SOK_WITH_CUDA)
  if (OnGpu(ctx)) {
    stream_executor::DeviceMemoryBase target(to->data(), to->TotalBytes());
    const stream_executor::DeviceMemoryBase source(from.data(), from.TotalBytes());
    return ctx->op_device_context()->stream()->Memcpy(&target, source, from.TotalBytes());
  }
#endif
  std::memcpy(to->data(), from.data(), from.TotalBytes());
  return absl::OkStatus();
}

// On the stream of the computation, and waited for here: TensorFlow's own copy goes to another stream and ends in a
// callback of a thread that polls for it, which takes longer than what is copied here.
absl::Status CopyToHost([[maybe_unused]] OpKernelContext* ctx, const void* from, Tensor* to) {
  if (to->TotalBytes() == 0) return absl::OkStatus();
#if defined(SOK_WITH_CUDA)
  if (OnGpu(ctx)) {
    auto* stream = ctx->op_device_context()->stream();
    const stream_executor::DeviceMemoryBase source(const_cast<void*>(from), to->TotalBytes());
    TF_RETURN_IF_ERROR(stream->Memcpy(to->data(), source, to->TotalBytes()));
    return stream->BlockHostUntilDone();
  }
#endif
  std::memcpy(to->data(), from, to->TotalBytes());
  return absl::OkStatus();
}

absl::Status CopyFromHost(OpKernelContext* ctx, const Tensor& from, Tensor* to) {
  if (!OnGpu(ctx)) return CopyOnDevice(ctx, from, to);
  return ctx->op_device_context()->CopyCPUTensorToDeviceSync(&from, DeviceOf(ctx), to);
}

absl::Status Fill([[maybe_unused]] OpKernelContext* ctx, void* memory, uint32_t pattern, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
#if defined(SOK_WITH_CUDA)
  if (OnGpu(ctx)) {
    stream_executor::DeviceMemoryBase filled(memory, bytes);
    return ctx->op_device_context()->stream()->Memset32(&filled, pattern, bytes);
  }
#endif
  std::fill_n(static_cast<uint32_t*>(memory), bytes / sizeof(pattern), pattern);
  return absl::OkStatus();
}

absl::Status OfMemory(OpKernelContext* ctx, const absl::Status& status) {
  if (!absl::IsResourceExhausted(status) || !OnGpu(ctx)) return status;
  return absl::ResourceExhaustedError(
      absl::StrCat(status.message(),
                   ". TensorFlow takes all memory of a GPU when it starts: with TF_FORCE_GPU_ALLOW_GROWTH=true or "
                   "tf.config.experimental.set_memory_growth it takes what it needs, with "
                   "tf.config.set_logical_device_configuration no more than a limit"));
}

absl::Status AllocateHost(OpKernelContext* ctx, ::tensorflow::DataType type, const ::tensorflow::TensorShape& shape,
                          Tensor* tensor) {
  ::tensorflow::AllocatorAttributes attributes;
  attributes.set_on_host(true);
  attributes.set_gpu_compatible(true);
  return ctx->allocate_temp(type, shape, tensor, attributes);
}

}  // namespace sok::tf
