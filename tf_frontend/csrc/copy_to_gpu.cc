// SPDX-License-Identifier: Apache-2.0
// copy_to_gpu: a batch from the host, beside the steps that were enqueued before it.
#include <memory>
#include <string>

#include "gpu.h"
#include "sok/batch_memory.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace sok::tf {

REGISTER_OP("SokCopyToGpu")
    .Input("values: T")
    .Output("copied: T")
    .Attr("T: {bool, int8, uint8, int16, uint16, int32, uint32, int64, uint64, half, bfloat16, float, double}")
    .SetIsStateful()
    .SetShapeFn(::tensorflow::shape_inference::UnchangedShape)
    .Doc(
        "The values in memory of the op's GPU. Blocks until they are there, and does not wait for what was enqueued\n"
        "before; on the CPU a copy.\n\n"
        "values: in host memory, which may be changed afterwards.\n"
        "copied: the same.\n");

class CopyOnHostOp : public ::tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    Tensor* copied = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(0).shape(), &copied));
    OP_REQUIRES_OK(ctx, CopyOnDevice(ctx, ctx->input(0), copied));
  }
};

REGISTER_KERNEL_BUILDER(Name("SokCopyToGpu").Device(::tensorflow::DEVICE_CPU).HostMemory("values"), CopyOnHostOp);

#if defined(SOK_WITH_CUDA)
namespace {

// The memory of a GPU for batches; as long as a tensor lies in it.
class BatchMemory : public ::tensorflow::ResourceBase {
 public:
  BatchMemory(sok_batch_memory* memory, void* stream) : memory_(memory), stream_(stream) {}
  ~BatchMemory() override { sok_batch_memory_destroy(memory_); }
  std::string DebugString() const override { return "SokBatchMemory"; }

  static absl::Status Of(OpKernelContext* ctx, ::tensorflow::core::RefCountPtr<BatchMemory>* found) {
    ::tensorflow::ResourceMgr* const resources = ctx->resource_manager();
    BatchMemory* made = nullptr;
    TF_RETURN_IF_ERROR(resources->LookupOrCreate<BatchMemory>(
        resources->default_container(), "sok_batch_memory", &made, [ctx](BatchMemory** created) {
          sok_batch_memory* memory = nullptr;
          TF_RETURN_IF_ERROR(SOK_TF_STATUS(sok_batch_memory_create({SOK_CUDA, GpuIndex(ctx)}, &memory)));
          *created = new BatchMemory(memory, GpuStream(ctx));
          return absl::OkStatus();
        }));
    found->reset(made);
    return absl::OkStatus();
  }

  sok_batch_memory* get() const { return memory_; }
  // Of the computation: whatever uses a tensor has been enqueued there by the time nobody holds it.
  void Release(void* data) { sok_batch_memory_release(memory_, data, stream_); }

 private:
  sok_batch_memory* memory_;
  void* stream_;
};

class BatchBuffer : public ::tensorflow::TensorBuffer {
 public:
  BatchBuffer(::tensorflow::core::RefCountPtr<BatchMemory> memory, void* data, size_t bytes)
      : TensorBuffer(data), memory_(std::move(memory)), bytes_(bytes) {}
  ~BatchBuffer() override { memory_->Release(data()); }

  size_t size() const override { return bytes_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(::tensorflow::AllocationDescription* description) const override {
    description->set_requested_bytes(static_cast<int64_t>(bytes_));
    description->set_allocator_name("sok_batch_memory");
  }
  // Nobody may write into it in place of its values, or give it away.
  bool OwnsMemory() const override { return false; }

 private:
  ::tensorflow::core::RefCountPtr<BatchMemory> memory_;
  size_t bytes_;
};

}  // namespace

class CopyToGpuOp : public ::tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& values = ctx->input(0);
    const auto bytes = static_cast<int64_t>(values.TotalBytes());
    if (bytes == 0) {
      Tensor* copied = nullptr;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(0, values.shape(), &copied));
      return;
    }
    ::tensorflow::core::RefCountPtr<BatchMemory> memory;
    OP_REQUIRES_OK(ctx, BatchMemory::Of(ctx, &memory));
    void* data = nullptr;
    OP_REQUIRES_OK(ctx,
                   OfMemory(ctx, SOK_TF_STATUS(sok_batch_memory_fill(memory->get(), values.data(), bytes, &data))));
    ::tensorflow::core::RefCountPtr<BatchBuffer> buffer(
        new BatchBuffer(std::move(memory), data, static_cast<size_t>(bytes)));
    ctx->set_output(0, Tensor(values.dtype(), values.shape(), buffer.get()));
  }
};

REGISTER_KERNEL_BUILDER(Name("SokCopyToGpu").Device(::tensorflow::DEVICE_GPU).HostMemory("values"), CopyToGpuOp);
#endif

}  // namespace sok::tf
