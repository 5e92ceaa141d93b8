// SPDX-License-Identifier: Apache-2.0
// fail: shows which TensorFlow error a status of the core becomes.
#include "gpu.h"
#include "support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok::tf {

REGISTER_OP("SokFail")
    .Attr("code: int")
    .Attr("message: string")
    .SetIsStateful()
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext*) { return absl::OkStatus(); })
    .Doc(
        "Fails as an op does to which the core returned a status; nothing happens for SOK_OK.\n\n"
        "code: sok_status.\n"
        "message: the core's message.\n");

class FailOp : public ::tensorflow::OpKernel {
 public:
  explicit FailOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), code_(Attribute<int>(ctx, "code")), message_(Attribute<std::string>(ctx, "message")) {}

  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, ToStatus(code_, message_)); }

 private:
  int code_;
  std::string message_;
};

SOK_REGISTER_KERNELS("SokFail", FailOp);

}  // namespace sok::tf
