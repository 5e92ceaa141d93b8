// SPDX-License-Identifier: Apache-2.0
// locate: keys -> slots on the rank that owns them.
#include "gpu.h"
#include "lookups.h"
#include "messages.h"
#include "tables.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

REGISTER_OP("SokLocate")
    .Input("keys: int64")
    .Input("counts: int64")
    .Output("slots: int64")
    .Output("bag_splits: int64")
    .SOK_TABLE_ATTRIBUTES.Attr("lookup_tables: list(int) >= 1")
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      std::vector<::tensorflow::shape_inference::ShapeHandle> keys;
      TF_RETURN_IF_ERROR(c->input("keys", &keys));
      TF_RETURN_IF_ERROR(c->WithRank(keys[0], 1, &keys[0]));
      for (int i = 0; i < 2; ++i) c->set_output(i, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(
        "Finds the slots of the keys that other ranks ask this one for.\n\n"
        "keys: the messages of keys as they came: for each rank those whose rows it wants, by table; those of bags, "
        "by\nlookup; row splits of the bags, by lookup.\n"
        "counts: what SokExchangeSizes had as `received`.\n"
        "slots: the slot of each key is where the key is in `keys`.\n"
        "bag_splits: `keys` where row splits are among them, else [0].\n" SOK_TABLE_ATTRIBUTES_DOC
        "lookup_tables: position of each lookup's table.\n");

class LocateOp : public ::tensorflow::OpKernel {
 public:
  explicit LocateOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), tables_(ctx), lookup_tables_(LookupTables(ctx, tables_.num_tables())) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor *keys, *counts;
    OP_REQUIRES_OK(ctx, ctx->input("keys", &keys));
    OP_REQUIRES_OK(ctx, ctx->input("counts", &counts));
    Messages messages;
    OP_REQUIRES_OK(ctx, messages.Read(*counts, tables_.dimensions(), lookup_tables_));
    OP_REQUIRES(ctx, keys->dims() == 1 && keys->NumElements() == messages->num_keys,
                errors::InvalidArgument("messages of ", messages->num_keys, " keys and row splits cannot be ",
                                        keys->shape().DebugString()));
    Tensor* slots = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {messages->num_keys}, &slots));
    ctx->set_output(1, messages->num_bag_splits > 0 ? *keys : keys->Slice(0, 0));
    std::vector<sok_lookup> lookups;
    OP_REQUIRES_OK(ctx, messages.Lookups(View(*keys), View(*slots), Absent(), &lookups));
    CoreContext core(ctx);
    SOK_TF_CALL(ctx, sok_locate(core.get(), tables_.num_tables(), tables_.tables().data(), nullptr,
                                static_cast<int32_t>(lookups.size()), lookups.data(), 0));
  }

 private:
  TableAttributes tables_;
  std::vector<int64_t> lookup_tables_;
};

SOK_REGISTER_KERNELS("SokLocate", LocateOp, .HostMemory("counts"));

}  // namespace sok::tf
