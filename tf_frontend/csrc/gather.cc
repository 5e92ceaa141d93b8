// SPDX-License-Identifier: Apache-2.0
// gather: slots -> rows, in the order in which they are sent back.
#include "counts.h"
#include "gpu.h"
#include "tables.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

REGISTER_OP("SokGather")
    .Input("tables: num_tables * resource")
    .Input("keys: int64")
    .Input("slots: int64")
    .Input("counts: int64")
    .Output("rows: float32")
    .SOK_TABLE_ATTRIBUTES
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(
        "Rows of this rank's tables for the keys that other ranks ask for.\n\n"
        "tables: float32, float16 or bfloat16 variables, this rank's rows of each table.\n"
        "keys: [sum(counts)] as they came.\n"
        "slots: as keys; what SokLocate gave.\n"
        "counts: [num_ranks, num_tables] how many keys came from each rank for each table.\n"
        "rows: the rows one after another, flat.\n" SOK_TABLE_ATTRIBUTES_DOC);

class GatherOp : public ::tensorflow::OpKernel {
 public:
  explicit GatherOp(OpKernelConstruction* ctx) : OpKernel(ctx), tables_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor *keys, *slots, *counts;
    OP_REQUIRES_OK(ctx, ctx->input("keys", &keys));
    OP_REQUIRES_OK(ctx, ctx->input("slots", &slots));
    OP_REQUIRES_OK(ctx, ctx->input("counts", &counts));
    OP_REQUIRES_OK(ctx, CheckCounts(*counts, tables_.num_tables()));
    Tensor* rows = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {NumElements(*counts, tables_.dimensions())}, &rows));
    std::vector<sok_table> tables = tables_.tables();
    VariableLocks locks;
    OP_REQUIRES_OK(ctx, locks.Lock(ctx, {"tables"}, VariableLocks::kShared));
    OP_REQUIRES_OK(ctx, SetWeights(&locks, &tables));
    CoreContext core(ctx);
    SOK_TF_CALL(ctx,
                sok_gather(core.get(), tables_.num_tables(), tables.data(), static_cast<int32_t>(counts->dim_size(0)),
                           counts->flat<int64_t>().data(), View(*keys), View(*slots), View(*rows)));
  }

 private:
  TableAttributes tables_;
};

SOK_REGISTER_KERNELS("SokGather", GatherOp, .HostMemory("counts"));

}  // namespace sok::tf
