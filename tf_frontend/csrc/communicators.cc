// SPDX-License-Identifier: Apache-2.0
// communicator_handle, communicator_close, gpu_index: from the core's communicator to a resource and back.
#include "communicators.h"

#include "gpu.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok::tf {

using ::tensorflow::ResourceHandle;
using ::tensorflow::shape_inference::InferenceContext;

absl::Status GetCommunicator(OpKernelContext* ctx, sok_communicator** communicator) {
  return GetCommunicator(ctx->input(0), communicator);
}

absl::Status GetCommunicator(const Tensor& handle, sok_communicator** communicator) {
  const auto resource = handle.scalar<ResourceHandle>()().GetResource<CommunicatorResource>();
  if (!resource.ok()) return resource.status();
  *communicator = (*resource)->get();
  if (*communicator == nullptr) {
    return errors::FailedPrecondition(
        "the exchange that this function was traced with was closed by sok.shutdown() or another sok.init(); trace it "
        "again");
  }
  return absl::OkStatus();
}

REGISTER_OP("SokCommunicatorHandle")
    .Output("communicator: resource")
    .Attr("address: int")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(
        "A handle of a communicator of the core.\n\n"
        "communicator: what SokAllToAll takes. Ops that take the same handle run in the order in which a tf.function "
        "makes them.\n"
        "address: of the sok_communicator, which the caller keeps alive until SokCommunicatorClose.\n");

class CommunicatorHandleOp : public ::tensorflow::OpKernel {
 public:
  explicit CommunicatorHandleOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), address_(Attribute<int64_t>(ctx, "address")) {}

  void Compute(OpKernelContext* ctx) override {
    Tensor* handle = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &handle));
    auto* resource = new CommunicatorResource(reinterpret_cast<sok_communicator*>(address_));
    handle->scalar<ResourceHandle>()() = ResourceHandle::MakeRefCountingHandle(resource, ctx->device()->name());
  }

 private:
  int64_t address_;
};

SOK_REGISTER_KERNELS("SokCommunicatorHandle", CommunicatorHandleOp, .HostMemory("communicator"));

REGISTER_OP("SokCommunicatorClose")
    .Input("communicator: resource")
    .SetShapeFn([](InferenceContext*) { return absl::OkStatus(); })
    .Doc(
        "Lets ops with this handle fail from now on, so that the communicator can be freed.\n\n"
        "communicator: what SokCommunicatorHandle gave.\n");

class CommunicatorCloseOp : public ::tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const auto resource = ctx->input(0).scalar<ResourceHandle>()().GetResource<CommunicatorResource>();
    OP_REQUIRES_OK(ctx, resource.status());
    (*resource)->Forget();
  }
};

SOK_REGISTER_KERNELS("SokCommunicatorClose", CommunicatorCloseOp, .HostMemory("communicator"));

REGISTER_OP("SokGpuIndex")
    .Output("index: int32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(
        "Which GPU TensorFlow's device is.\n\n"
        "index: the CUDA number of the GPU that the op is placed on, in host memory; -1 on the CPU.\n");

class GpuIndexOp : public ::tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    Tensor* index = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &index));
    OP_REQUIRES_OK(ctx, OnGpu(ctx) ? WaitForGpu(ctx) : absl::OkStatus());
    index->scalar<int32_t>()() = OnGpu(ctx) ? GpuIndex(ctx) : -1;
  }
};

SOK_REGISTER_KERNELS("SokGpuIndex", GpuIndexOp, .HostMemory("index"));

}  // namespace sok::tf
