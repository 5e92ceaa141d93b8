// SPDX-License-Identifier: Apache-2.0
// unfolded: a tensor that TensorFlow does not compute while it makes or optimizes a graph, whatever it is made of.
#include "gpu.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/register_types.h"

namespace sok::tf {

REGISTER_OP("SokUnfolded")
    .Input("tensor: T")
    .Output("same: T")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(::tensorflow::shape_inference::UnchangedShape)
    .Doc(
        "The tensor. What takes it is run by the graph alone, not by TensorFlow's folding of constants, which computes "
        "ops that it takes for pure functions.\n");

class UnfoldedOp : public ::tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override { ctx->set_output(0, ctx->input(0)); }
};

REGISTER_KERNEL_BUILDER(Name("SokUnfolded").Device(::tensorflow::DEVICE_CPU), UnfoldedOp);

#if defined(SOK_WITH_CUDA)
#define SOK_REGISTER_ON_GPU(type) \
  REGISTER_KERNEL_BUILDER(Name("SokUnfolded").Device(::tensorflow::DEVICE_GPU).TypeConstraint<type>("T"), UnfoldedOp);
TF_CALL_NUMBER_TYPES_NO_INT32(SOK_REGISTER_ON_GPU)
TF_CALL_bool(SOK_REGISTER_ON_GPU)
#undef SOK_REGISTER_ON_GPU
// TensorFlow has int32 of a GPU in host memory.
REGISTER_KERNEL_BUILDER(Name("SokUnfolded")
                            .Device(::tensorflow::DEVICE_GPU)
                            .HostMemory("tensor")
                            .HostMemory("same")
                            .TypeConstraint<int32_t>("T"),
                        UnfoldedOp);
#endif

}  // namespace sok::tf
