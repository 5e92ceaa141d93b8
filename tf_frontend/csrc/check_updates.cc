// SPDX-License-Identifier: Apache-2.0
// check_updates, raise_together: what one rank finds wrong before a step, no rank steps with.
#include <string>

#include "gpu.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "updates.h"

namespace sok::tf {

REGISTER_OP("SokCheckUpdates")
    .SOK_UPDATE_INPUTS.Output("failed: int64")
    .Output("message: string")
    .SOK_UPDATE_ATTRIBUTES.SetIsStateful()
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckUpdateShapes(c));
      c->set_output(0, c->Vector(1));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(
        "Whether SokApply would fail with the same inputs. Nothing changes.\n\n"
        "failed: [1] 0, or the code of the error times the number of ranks, and this rank added.\n"
        "message: of this error.\n" SOK_UPDATE_DOC);

class CheckUpdatesOp : public UpdateKernel {
 public:
  using UpdateKernel::UpdateKernel;

  void Compute(OpKernelContext* ctx) override {
    bool right = false;
    const auto stop = [](void* opaque) -> int {
      *static_cast<bool*>(opaque) = true;
      return 1;
    };
    const absl::Status status = Apply(ctx, VariableLocks::kShared, stop, &right);
    Tensor *failed, *message;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("failed", {1}, &failed));
    OP_REQUIRES_OK(ctx, ctx->allocate_output("message", {}, &message));
    failed->flat<int64_t>()(0) = right ? 0 : static_cast<int64_t>(status.raw_code()) * num_ranks() + rank();
    message->scalar<::tensorflow::tstring>()() = right ? std::string() : std::string(status.message());
  }
};

SOK_REGISTER_UPDATE_KERNELS("SokCheckUpdates", CheckUpdatesOp, .HostMemory("failed"));

REGISTER_OP("SokRaiseTogether")
    .Input("received: int64")
    .Input("message: string")
    .Attr("num_ranks: int >= 1")
    .SetIsStateful()
    .SetShapeFn(::tensorflow::shape_inference::NoOutputs)
    .Doc(
        "Fails where a rank has found something wrong with its step: there with its message, elsewhere with its\n"
        "number.\n\n"
        "received: [1] the largest of what SokCheckUpdates gave as `failed` on the ranks.\n"
        "message: what it gave.\n"
        "num_ranks: of the job.\n");

class RaiseTogetherOp : public ::tensorflow::OpKernel {
 public:
  explicit RaiseTogetherOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), num_ranks_(Attribute<int64_t>(ctx, "num_ranks")) {}

  void Compute(OpKernelContext* ctx) override {
    const int64_t received = ctx->input(0).flat<int64_t>()(0), rank = received % num_ranks_;
    if (received == 0) return;
    const std::string own(std::string_view(ctx->input(1).scalar<::tensorflow::tstring>()()));
    const auto code = static_cast<absl::StatusCode>(received / num_ranks_);
    ctx->CtxFailure(absl::Status(code, !own.empty()
                                           ? own
                                           : absl::StrCat("rank ", rank,
                                                          " has failed in this step (its own message says why), so no "
                                                          "rank changes a table")));
  }

 private:
  int64_t num_ranks_;
};

SOK_REGISTER_KERNELS("SokRaiseTogether", RaiseTogetherOp, .HostMemory("received"));

}  // namespace sok::tf
