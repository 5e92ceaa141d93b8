// SPDX-License-Identifier: Apache-2.0
// gather: slots -> rows and sums of rows, in the order in which they are sent back.
#include "gpu.h"
#include "lookups.h"
#include "messages.h"
#include "read_by_key.h"
#include "tables.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

REGISTER_OP("SokGather")
    .Input("tables: num_tables * resource")
    .Input("slots: int64")
    .Input("bag_splits: int64")
    .Input("counts: int64")
    .SOK_GENERATIONS_INPUT.Output("rows: float32")
    .SOK_TABLE_ATTRIBUTES.Attr("lookup_tables: list(int) >= 1")
    .SOK_BY_KEY_ATTRIBUTE
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(
        "Rows of this rank's tables for the keys that other ranks ask for, and sums of the rows of the bags that are "
        "pooled here.\n\n"
        "tables: float32, float16 or bfloat16 variables, this rank's rows of each table.\n"
        "slots: what SokLocate gave.\n"
        "bag_splits: what SokLocate gave.\n"
        "counts: what SokExchangeSizes had as `received`.\n" SOK_GENERATIONS_INPUT_DOC
        "rows: flat; for each rank its rows one after another, then its sums.\n" SOK_TABLE_ATTRIBUTES_DOC
        "lookup_tables: position of each lookup's table.\n" SOK_BY_KEY_ATTRIBUTE_DOC);

class GatherOp : public ::tensorflow::OpKernel {
 public:
  explicit GatherOp(OpKernelConstruction* ctx)
      : OpKernel(ctx),
        tables_(ctx),
        lookup_tables_(LookupTables(ctx, tables_.num_tables())),
        by_key_(Attribute<bool>(ctx, "by_key")) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor *slots, *bag_splits, *counts;
    OP_REQUIRES_OK(ctx, ctx->input("slots", &slots));
    OP_REQUIRES_OK(ctx, ctx->input("bag_splits", &bag_splits));
    OP_REQUIRES_OK(ctx, ctx->input("counts", &counts));
    Messages messages;
    OP_REQUIRES_OK(ctx, messages.Read(*counts, tables_.dimensions(), lookup_tables_));
    Tensor* floats = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {messages->num_floats}, &floats));
    VariableLocks locks;
    OP_REQUIRES_OK(ctx, locks.Lock(ctx, {"tables"}, VariableLocks::kShared));
    std::vector<sok_columns> columns;
    OP_REQUIRES_OK(ctx, ReadColumns(&locks, tables_, &columns));
    std::vector<sok_lookup> lookups;
    OP_REQUIRES_OK(ctx, messages.Lookups(messages.SplitsIn(*bag_splits), View(*slots), View(*floats), &lookups));
    CoreContext core(ctx);
    RowsByKey rows;
    if (by_key_) OP_REQUIRES_OK(ctx, rows.Read(ctx, core.get(), tables_, &numbers_, &locks, &columns, &lookups));
    SOK_TF_CALL(ctx, sok_gather_combine(core.get(), static_cast<int32_t>(columns.size()), columns.data(),
                                        static_cast<int32_t>(lookups.size()), lookups.data()));
  }

 private:
  TableAttributes tables_;
  std::vector<int64_t> lookup_tables_;
  bool by_key_;
  Numbers numbers_;
};

SOK_REGISTER_KERNELS("SokGather", GatherOp, .HostMemory("counts").HostMemory("generations"));

}  // namespace sok::tf
