// SPDX-License-Identifier: Apache-2.0
#include "gpu.h"

#include <cstring>

#include "absl/synchronization/notification.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/framework/device_base.h"

#if defined(SOK_WITH_CUDA)
#include "xla/stream_executor/device_memory.h"
#include "xla/stream_executor/stream.h"
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

// On the stream of the computation, and waited for here: TensorFlow's own copy goes to another stream and ends in a
// callback of a thread that polls for it, which takes longer than what is copied here.
absl::Status CopyToHost(OpKernelContext* ctx, const Tensor& from, Tensor* to) {
  if (from.TotalBytes() == 0) return absl::OkStatus();
  auto* stream = ctx->op_device_context()->stream();
  const stream_executor::DeviceMemoryBase source(from.data(), from.TotalBytes());
  TF_RETURN_IF_ERROR(stream->Memcpy(to->data(), source, from.TotalBytes()));
  return stream->BlockHostUntilDone();
}

#else

bool OnGpu(OpKernelContext*) { return false; }

int GpuIndex(OpKernelContext*) { return -1; }

void* GpuStream(OpKernelContext*) { return nullptr; }

absl::Status WaitForGpu(OpKernelContext*) { return absl::OkStatus(); }

absl::Status CopyToHost(OpKernelContext*, const Tensor& from, Tensor* to) {
  if (from.TotalBytes() > 0) std::memcpy(to->data(), from.data(), from.TotalBytes());
  return absl::OkStatus();
}

#endif

absl::Status CopyOnDevice(OpKernelContext* ctx, const Tensor& from, Tensor* to) {
  if (from.TotalBytes() == 0) return absl::OkStatus();
  if (!OnGpu(ctx)) {
    std::memcpy(to->data(), from.data(), from.TotalBytes());
    return absl::OkStatus();
  }
  absl::Notification enqueued;
  absl::Status result;
  ctx->op_device_context()->CopyTensorInSameDevice(&from, DeviceOf(ctx), to, [&](const absl::Status& status) {
    result = status;
    enqueued.Notify();
  });
  enqueued.WaitForNotification();
  return result;
}

absl::Status CopyToGpu(OpKernelContext* ctx, const Tensor& from, Tensor* to) {
  return ctx->op_device_context()->CopyCPUTensorToDeviceSync(&from, DeviceOf(ctx), to);
}

absl::Status AllocateHost(OpKernelContext* ctx, ::tensorflow::DataType type, const ::tensorflow::TensorShape& shape,
                          Tensor* tensor) {
  ::tensorflow::AllocatorAttributes attributes;
  attributes.set_on_host(true);
  attributes.set_gpu_compatible(true);
  return ctx->allocate_temp(type, shape, tensor, attributes);
}

}  // namespace sok::tf
