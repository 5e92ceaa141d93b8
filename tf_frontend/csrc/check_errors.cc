// SPDX-License-Identifier: Apache-2.0
// check_errors: raises what a GPU has found wrong.
#include "device_errors.h"
#include "gpu.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok::tf {

REGISTER_OP("SokCheckErrors")
    .SetIsStateful()
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext*) { return absl::OkStatus(); })
    .Doc(
        "Waits for the work of the op's GPU and fails with the first thing that lookups and updates there found wrong "
        "since an\n"
        "op last failed with such an error. On the CPU ops fail themselves, and there is nothing to wait for.\n");

class CheckErrorsOp : public ::tensorflow::OpKernel {
 public:
  explicit CheckErrorsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, WaitAndCheckDevice(ctx)); }
};

SOK_REGISTER_KERNELS("SokCheckErrors", CheckErrorsOp);

}  // namespace sok::tf
