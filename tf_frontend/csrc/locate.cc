// SPDX-License-Identifier: Apache-2.0
// locate: keys -> slots on the rank that owns them.
#include "counts.h"
#include "gpu.h"
#include "tables.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

REGISTER_OP("SokLocate")
    .Input("tables: num_tables * resource")
    .Input("keys: int64")
    .Input("counts: int64")
    .Output("slots: int64")
    .SOK_TABLE_ATTRIBUTES
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      std::vector<::tensorflow::shape_inference::ShapeHandle> keys;
      TF_RETURN_IF_ERROR(c->input("keys", &keys));
      TF_RETURN_IF_ERROR(c->WithRank(keys[0], 1, &keys[0]));
      c->set_output(0, keys[0]);
      return absl::OkStatus();
    })
    .Doc(
        "Slots of the keys that other ranks ask this one for.\n\n"
        "tables: float32, float16 or bfloat16 variables, this rank's rows of each table.\n"
        "keys: [sum(counts)] as they came, by rank, then by table.\n"
        "counts: [num_ranks, num_tables] how many came from each rank for each table.\n"
        "slots: as keys.\n" SOK_TABLE_ATTRIBUTES_DOC);

class LocateOp : public ::tensorflow::OpKernel {
 public:
  explicit LocateOp(OpKernelConstruction* ctx) : OpKernel(ctx), tables_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor *keys, *counts;
    OP_REQUIRES_OK(ctx, ctx->input("keys", &keys));
    OP_REQUIRES_OK(ctx, ctx->input("counts", &counts));
    OP_REQUIRES_OK(ctx, CheckCounts(*counts, tables_.num_tables()));
    Tensor* slots = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, keys->shape(), &slots));
    std::vector<sok_table> tables = tables_.tables();
    VariableLocks locks;
    OP_REQUIRES_OK(ctx, locks.Lock(ctx, {"tables"}, VariableLocks::kShared));
    OP_REQUIRES_OK(ctx, SetWeights(&locks, &tables));
    CoreContext core(ctx);
    SOK_TF_CALL(ctx,
                sok_locate(core.get(), tables_.num_tables(), tables.data(), static_cast<int32_t>(counts->dim_size(0)),
                           counts->flat<int64_t>().data(), View(*keys), View(*slots), 0));
  }

 private:
  TableAttributes tables_;
};

SOK_REGISTER_KERNELS("SokLocate", LocateOp, .HostMemory("counts"));

}  // namespace sok::tf
