// SPDX-License-Identifier: Apache-2.0
// gather: slots -> rows and sums of rows, in the order in which they are sent back.
#include "gpu.h"
#include "lookups.h"
#include "messages.h"
#include "tables.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

REGISTER_OP("SokGather")
    .Input("tables: num_tables * resource")
    .Input("keys: int64")
    .Input("slots: int64")
    .Input("bag_splits: int64")
    .Input("counts: int64")
    .Output("rows: float32")
    .SOK_TABLE_ATTRIBUTES.Attr("lookup_tables: list(int) >= 1")
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(
        "Rows of this rank's tables for the keys that other ranks ask for, and sums of the rows of the bags that are "
        "pooled here.\n\n"
        "tables: float32, float16 or bfloat16 variables, this rank's rows of each table.\n"
        "keys: what SokLocate gave as `located_keys`.\n"
        "slots: what SokLocate gave.\n"
        "bag_splits: what SokLocate gave.\n"
        "counts: [num_ranks, num_tables + 2 num_lookups] what SokExchangeSizes gave.\n"
        "rows: flat; for each rank its rows one after another, then its sums.\n" SOK_TABLE_ATTRIBUTES_DOC
        "lookup_tables: position of each lookup's table.\n");

class GatherOp : public ::tensorflow::OpKernel {
 public:
  explicit GatherOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), tables_(ctx), lookup_tables_(LookupTables(ctx, tables_.num_tables())) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor *keys, *slots, *bag_splits, *counts;
    OP_REQUIRES_OK(ctx, ctx->input("keys", &keys));
    OP_REQUIRES_OK(ctx, ctx->input("slots", &slots));
    OP_REQUIRES_OK(ctx, ctx->input("bag_splits", &bag_splits));
    OP_REQUIRES_OK(ctx, ctx->input("counts", &counts));
    Messages messages;
    OP_REQUIRES_OK(ctx, messages.Read(*counts, tables_.dimensions(), lookup_tables_));
    const int64_t num_row_keys = messages.row_keys().total, num_keys = messages.num_keys();
    for (const Tensor* each : {keys, slots}) {
      OP_REQUIRES(
          ctx, each->dims() == 1 && each->NumElements() == num_keys,
          errors::InvalidArgument("counts want ", num_keys, " keys and slots, not ", each->shape().DebugString()));
    }
    Tensor* floats = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {messages.num_floats()}, &floats));
    RowsAndSums out;
    OP_REQUIRES_OK(ctx, out.Allocate(ctx, messages, *floats));
    std::vector<sok_table> tables = tables_.tables();
    VariableLocks locks;
    OP_REQUIRES_OK(ctx, locks.Lock(ctx, {"tables"}, VariableLocks::kShared));
    OP_REQUIRES_OK(ctx, SetWeights(&locks, &tables));
    CoreContext core(ctx);
    SOK_TF_CALL(ctx, sok_gather(core.get(), tables_.num_tables(), tables.data(),
                                static_cast<int32_t>(messages.num_ranks()), messages.row_counts().data(),
                                View(keys->Slice(0, num_row_keys)), View(slots->Slice(0, num_row_keys)), out.rows()));
    if (messages.parts().empty()) return;
    // As one source's lookups: which are pooled here differs from source to source.
    std::vector<int32_t> part_tables;
    std::vector<int64_t> part_keys, part_bags;
    for (const BagPart& part : messages.parts()) {
      part_tables.push_back(part.table);
      part_keys.push_back(part.num_keys);
      part_bags.push_back(part.num_bags);
    }
    SOK_TF_CALL(
        ctx, sok_gather_bags(core.get(), tables_.num_tables(), tables.data(), static_cast<int32_t>(part_tables.size()),
                             part_tables.data(), 1, part_keys.data(), part_bags.data(),
                             View(slots->Slice(num_row_keys, num_keys)), View(*bag_splits), Absent(), out.sums()));
    OP_REQUIRES_OK(ctx, out.Join(core, messages));
  }

 private:
  TableAttributes tables_;
  std::vector<int64_t> lookup_tables_;
};

SOK_REGISTER_KERNELS("SokGather", GatherOp, .HostMemory("counts"));

}  // namespace sok::tf
