// SPDX-License-Identifier: Apache-2.0
// require: tf.debugging.Assert without a side effect. TensorFlow orders what has side effects around an assertion, so
// exchanges that ranks make in another order would wait for one another.
#include "support.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok::tf {

REGISTER_OP("SokRequire")
    .Input("value: T")
    .Input("holds: bool")
    .Input("message: string")
    .Output("same: T")
    .Attr("T: type")
    .SetShapeFn(::tensorflow::shape_inference::UnchangedShape)
    .Doc(
        "`value`, or InvalidArgumentError where a condition does not hold. It runs where its result is used.\n\n"
        "value: what is only right under the condition.\n"
        "holds: a scalar, the condition.\n"
        "message: a scalar, of the error.\n"
        "same: `value`.\n");

class RequireOp : public ::tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    for (const int i : {1, 2}) {
      OP_REQUIRES(ctx, ctx->input(i).NumElements() == 1, errors::InvalidArgument("one condition and one message"));
    }
    OP_REQUIRES(ctx, ctx->input(1).flat<bool>()(0),
                errors::InvalidArgument(absl::string_view(ctx->input(2).flat<::tensorflow::tstring>()(0))));
    ctx->set_output(0, ctx->input(0));
  }
};

REGISTER_KERNEL_BUILDER(Name("SokRequire").Device(::tensorflow::DEVICE_CPU), RequireOp);

}  // namespace sok::tf
