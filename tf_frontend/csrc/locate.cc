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
        "Takes apart what other ranks ask this one for, and finds the slots of the keys.\n\n"
        "keys: the messages of keys as they came: for each rank those whose rows it wants, by table; those of bags, "
        "by\nlookup; row splits of the bags, by lookup.\n"
        "counts: [num_ranks, num_tables + 2 num_lookups] what SokExchangeSizes gave.\n"
        "slots: [n + m] of the keys whose rows are wanted, by rank and table, then of the keys of bags, by rank and "
        "lookup.\n"
        "bag_splits: the row splits of the bags, by rank and lookup.\n" SOK_TABLE_ATTRIBUTES_DOC
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
    const int64_t num_row_keys = messages.row_keys().total, num_keys = messages.num_keys();
    OP_REQUIRES(ctx, keys->dims() == 1 && keys->NumElements() == num_keys + messages.bag_splits().total,
                errors::InvalidArgument("messages of ", num_keys, " keys and ", messages.bag_splits().total,
                                        " row splits cannot be ", keys->shape().DebugString()));
    Tensor *slots = nullptr, *bag_splits = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {num_keys}, &slots));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, {messages.bag_splits().total}, &bag_splits));
    CoreContext core(ctx);
    Tensor located = *keys;
    if (!messages.parts().empty()) {
      OP_REQUIRES_OK(ctx, ctx->allocate_temp(::tensorflow::DT_INT64, {num_keys}, &located));
      OP_REQUIRES_OK(ctx, TakeApart(core, View(*keys),
                                    {{&messages.row_keys(), View(located.Slice(0, num_row_keys))},
                                     {&messages.bag_keys(), View(located.Slice(num_row_keys, num_keys))},
                                     {&messages.bag_splits(), View(*bag_splits)}}));
    }
    const std::vector<sok_lookup> lookups =
        OwnerLookups(messages, tables_.dimensions(), View(located), View(*slots), Absent(), Absent());
    SOK_TF_CALL(ctx, sok_locate(core.get(), tables_.num_tables(), tables_.tables().data(), nullptr,
                                static_cast<int32_t>(lookups.size()), lookups.data(), 0));
  }

 private:
  TableAttributes tables_;
  std::vector<int64_t> lookup_tables_;
};

SOK_REGISTER_KERNELS("SokLocate", LocateOp, .HostMemory("counts"));

}  // namespace sok::tf
