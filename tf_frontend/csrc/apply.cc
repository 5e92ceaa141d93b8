// SPDX-License-Identifier: Apache-2.0
// apply: the optimizer step of all tables, straight from gradients that nobody materialised.
#include "communicators.h"
#include "device_errors.h"
#include "gpu.h"
#include "tensorflow/core/framework/op.h"
#include "updates.h"

namespace sok::tf {
namespace {

// The other ranks, to whom this one tells once whether it has failed. What sok_apply has to be asked by.
class OtherRanks {
 public:
  OtherRanks(const sok_context* context, sok_communicator* communicator)
      : context_(context), communicator_(communicator) {}

  absl::Status Tell(bool failed) {
    told_ = true;
    return SOK_TF_STATUS(sok_share_errors(context_, communicator_, failed ? 1 : 0));
  }
  bool told() const { return told_; }

  static int Agree(void* opaque) {
    auto* const self = static_cast<OtherRanks*>(opaque);
    self->status_ = self->Tell(false);
    return self->status_.ok() ? 0 : 1;
  }
  // Of Agree.
  const absl::Status& status() const { return status_; }

 private:
  const sok_context* context_;
  sok_communicator* communicator_;
  bool told_ = false;
  absl::Status status_;
};

}  // namespace

REGISTER_OP("SokApply")
    .SOK_UPDATE_INPUTS.Input("communicator: num_communicators * resource")
    .SOK_UPDATE_ATTRIBUTES.Attr("num_communicators: int >= 0")
    .SetShapeFn(CheckUpdateShapes)
    .Doc(
        "Updates the rows that the gradients name, and their optimizer states, in place; other rows are not "
        "touched. The UTC time in nanoseconds is written into the stamps of the rows that change.\n\n"
        "communicator: none, or what SokCommunicatorHandle gave, of the op's GPU: then all ranks run it in the same\n"
        "order as their exchanges, and no rank changes a row where one has failed. Nothing waits: who has not failed\n"
        "itself learns of it from the next lookup or SokCheckErrors.\n" SOK_UPDATE_DOC);

class ApplyOp : public UpdateKernel {
 public:
  using UpdateKernel::UpdateKernel;

  void Compute(OpKernelContext* ctx) override {
    // With several ranks the next lookup raises, on all of them.
    if (num_ranks() == 1) OP_REQUIRES_OK(ctx, CheckDevice(ctx));
    ::tensorflow::OpInputList communicators;
    OP_REQUIRES_OK(ctx, ctx->input_list("communicator", &communicators));
    if (communicators.size() == 0) {
      OP_REQUIRES_OK(ctx, Apply(ctx, VariableLocks::kExclusive, nullptr, nullptr));
      return;
    }
    sok_communicator* communicator = nullptr;
    OP_REQUIRES_OK(ctx, GetCommunicator(communicators[0], &communicator));
    CoreContext core(ctx);
    OtherRanks others(core.get(), communicator);
    const absl::Status status = Apply(ctx, VariableLocks::kExclusive, OtherRanks::Agree, &others);
    OP_REQUIRES_OK(ctx, others.status());
    if (!others.told()) OP_REQUIRES_OK(ctx, others.Tell(true));
    OP_REQUIRES_OK(ctx, status);
  }
};

SOK_REGISTER_UPDATE_KERNELS("SokApply", ApplyOp);

}  // namespace sok::tf
