// SPDX-License-Identifier: Apache-2.0
// apply: the optimizer step of all tables, straight from gradients that nobody materialised.
#include "device_errors.h"
#include "gpu.h"
#include "tensorflow/core/framework/op.h"
#include "updates.h"

namespace sok::tf {

REGISTER_OP("SokApply")
    .SOK_UPDATE_INPUTS.SOK_UPDATE_ATTRIBUTES.SetShapeFn(CheckUpdateShapes)
    .Doc(
        "Updates the rows that the gradients name, and their optimizer states, in place; other rows are not "
        "touched. The UTC time in nanoseconds is written into the stamps of the rows that change.\n\n" SOK_UPDATE_DOC);

class ApplyOp : public UpdateKernel {
 public:
  using UpdateKernel::UpdateKernel;

  void Compute(OpKernelContext* ctx) override {
    // With several ranks the next lookup raises, on all of them.
    if (num_ranks() == 1) OP_REQUIRES_OK(ctx, CheckDevice(ctx));
    OP_REQUIRES_OK(ctx, Apply(ctx, VariableLocks::kExclusive, nullptr, nullptr));
  }
};

SOK_REGISTER_UPDATE_KERNELS("SokApply", ApplyOp);

}  // namespace sok::tf
