// SPDX-License-Identifier: Apache-2.0
// agreed, share_errors: what one rank could not insert, no rank has inserted.
#include <string>
#include <vector>

#include "communicators.h"
#include "gpu.h"
#include "lookups.h"
#include "messages.h"
#include "tables.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {
namespace {

absl::Status Failure(int64_t code, const std::string& text) {
  return absl::Status(static_cast<absl::StatusCode>(code), text);
}

}  // namespace

REGISTER_OP("SokAgreed")
    .Input("indexed_tables: num_indexed * resource")
    .Input("keys: int64")
    .Input("slots: int64")
    .Input("counts: int64")
    .Input("failed: int64")
    .Input("received: int64")
    .Input("message: string")
    .Output("agreed: int64")
    .SOK_TABLE_ATTRIBUTES.Attr("num_indexed: int >= 1")
    .Attr("lookup_tables: list(int) >= 1")
    .SetIsStateful()
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      std::vector<::tensorflow::shape_inference::ShapeHandle> slots;
      TF_RETURN_IF_ERROR(c->input("slots", &slots));
      return c->set_output("agreed", slots);
    })
    .Doc(
        "The slots that SokLocate gave, once every rank has inserted. Where one could not, all fail, and those that\n"
        "did take their new keys back (not what they evicted for them).\n\n"
        "indexed_tables: as SokLocate took them.\n"
        "keys: as SokLocate took them.\n"
        "slots: what it gave.\n"
        "counts: as SokLocate took them.\n"
        "failed: [num_ranks, 1] what it gave.\n"
        "received: the same of each rank.\n"
        "message: what it gave.\n"
        "agreed: the slots.\n"
        "lookup_tables: position of each lookup's table.\n" SOK_TABLE_ATTRIBUTES_DOC);

class AgreedOp : public ::tensorflow::OpKernel {
 public:
  explicit AgreedOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), tables_(ctx), lookup_tables_(LookupTables(ctx, tables_.num_tables())) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor *failed, *received, *message, *slots;
    OP_REQUIRES_OK(ctx, ctx->input("failed", &failed));
    OP_REQUIRES_OK(ctx, ctx->input("received", &received));
    OP_REQUIRES_OK(ctx, ctx->input("message", &message));
    OP_REQUIRES_OK(ctx, ctx->input("slots", &slots));
    if (const int64_t own = failed->flat<int64_t>()(0); own != 0) {
      OP_REQUIRES_OK(ctx, Failure(own, std::string(std::string_view(message->scalar<::tensorflow::tstring>()()))));
    }
    for (int64_t rank = 0; rank < received->NumElements(); ++rank) {
      const int64_t code = received->flat<int64_t>()(rank);
      if (code == 0) continue;
      if (!OnGpu(ctx)) OP_REQUIRES_OK(ctx, Undo(ctx, *slots));
      OP_REQUIRES_OK(ctx,
                     Failure(code, absl::StrCat("rank ", rank, " could not take up the keys of the batch (its own ",
                                                "message says why), so no rank does")));
    }
    ctx->set_output(0, *slots);
  }

 private:
  absl::Status Undo(OpKernelContext* ctx, const Tensor& slots) const {
    const Tensor *keys, *counts;
    TF_RETURN_IF_ERROR(ctx->input("keys", &keys));
    TF_RETURN_IF_ERROR(ctx->input("counts", &counts));
    Messages messages;
    TF_RETURN_IF_ERROR(messages.Read(*counts, tables_.dimensions(), lookup_tables_));
    std::vector<sok_lookup> lookups;
    TF_RETURN_IF_ERROR(messages.Lookups(View(*keys), View(slots), Absent(), &lookups));
    VariableLocks locks;
    TF_RETURN_IF_ERROR(locks.Lock(ctx, {"indexed_tables"}, VariableLocks::kExclusive));
    CoreContext core(ctx);
    for (const sok_lookup& lookup : lookups) {
      if (!tables_.is_indexed(lookup.table)) continue;
      const int place = tables_.place(lookup.table);
      IndexedTable* table = nullptr;
      TF_RETURN_IF_ERROR(FindIndexed(tables_.tables()[lookup.table], *locks.tensor(place), &table));
      TF_RETURN_IF_ERROR(table->TakeBack(core.get(), lookup.keys, lookup.slots));
      ShowGrown(locks.variable(place));
    }
    return absl::OkStatus();
  }

  TableAttributes tables_;
  std::vector<int64_t> lookup_tables_;
};

SOK_REGISTER_KERNELS("SokAgreed", AgreedOp, .HostMemory("counts").HostMemory("failed").HostMemory("received"));

REGISTER_OP("SokShareErrors")
    .Input("communicator: resource")
    .Input("failed: int64")
    .Input("message: string")
    .Input("slots: int64")
    .Output("shared: int64")
    .SetIsStateful()
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->input(3));
      return absl::OkStatus();
    })
    .Doc(
        "Tells all ranks on GPUs, without a wait, whether one has failed: then no table changes any more, and the\n"
        "next lookup fails on all.\n\n"
        "communicator: what SokCommunicatorHandle gave; of the op's GPU.\n"
        "failed: [num_ranks, 1] what SokLocate gave: what it found wrong itself, which fails here.\n"
        "message: what SokLocate gave.\n"
        "slots: what SokLocate gave.\n"
        "shared: the slots.\n");

#if defined(SOK_WITH_CUDA)
class ShareErrorsOp : public ::tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    sok_communicator* communicator = nullptr;
    OP_REQUIRES_OK(ctx, GetCommunicator(ctx, &communicator));
    const int64_t own = ctx->input(1).flat<int64_t>()(0);
    CoreContext core(ctx);
    SOK_TF_CALL(ctx, sok_share_errors(core.get(), communicator, own != 0));
    const std::string text(std::string_view(ctx->input(2).scalar<::tensorflow::tstring>()()));
    if (own != 0) OP_REQUIRES_OK(ctx, Failure(own, text));
    ctx->set_output(0, ctx->input(3));
  }
};

REGISTER_KERNEL_BUILDER(
    Name("SokShareErrors").Device(::tensorflow::DEVICE_GPU).HostMemory("communicator").HostMemory("failed"),
    ShareErrorsOp);
#endif

}  // namespace sok::tf
