// SPDX-License-Identifier: Apache-2.0
// combine: exchanged rows and sums of rows -> one vector a bag.
#include "gpu.h"
#include "lookups.h"
#include "messages.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

REGISTER_OP("SokCombine")
    .SOK_LOOKUP_INPUTS.Input("rows: float32")
    .Input("inverse: int64")
    .Input("order: int32")
    .Input("unique_splits: int32")
    .Input("requests: int64")
    .SOK_POOLED_OUTPUTS.SOK_TABLE_ATTRIBUTES.SOK_LOOKUP_ATTRIBUTES.SetShapeFn(LookupOutputShapes)
    .Doc("Pools the rows that came back, and adds up the sums.\n\n" SOK_LOOKUP_INPUTS_DOC
         "rows: flat; from each rank one row for each unique key in send order, then the sums of its parts of bags.\n"
         "inverse: [n] what SokRoute gave.\n"
         "order: [n] what SokRoute gave; for the gradient.\n"
         "unique_splits: [n + 1] what SokRoute gave; for the gradient.\n"
         "requests: what SokExchangeSizes had as `sent`.\n" SOK_POOLED_OUTPUTS_DOC SOK_TABLE_ATTRIBUTES_DOC
             SOK_LOOKUP_ATTRIBUTES_DOC);

class CombineOp : public ::tensorflow::OpKernel {
 public:
  explicit CombineOp(OpKernelConstruction* ctx) : OpKernel(ctx), tables_(ctx), lookups_(ctx, tables_.num_tables()) {}

  void Compute(OpKernelContext* ctx) override {
    const std::vector<sok_placement>& tables = tables_.tables();
    std::vector<sok_lookup> lookups;
    OP_REQUIRES_OK(ctx, lookups_.Read(ctx, tables, &lookups));
    OP_REQUIRES_OK(ctx, AllocateOutputs(ctx, tables, &lookups));
    const Tensor *floats, *inverse, *requests;
    OP_REQUIRES_OK(ctx, ctx->input("rows", &floats));
    OP_REQUIRES_OK(ctx, ctx->input("inverse", &inverse));
    OP_REQUIRES_OK(ctx, ctx->input("requests", &requests));
    Messages messages;
    OP_REQUIRES_OK(ctx, messages.Read(*requests, tables_.dimensions(), lookups_.tables()));
    CoreContext core(ctx);
    SOK_TF_CALL(ctx, sok_combine(core.get(), tables_.num_tables(), tables.data(), lookups_.num_lookups(),
                                 lookups.data(), messages.get(), View(*inverse), View(*floats)));
  }

 private:
  TableAttributes tables_;
  LookupAttributes lookups_;
};

SOK_REGISTER_KERNELS("SokCombine", CombineOp, .HostMemory("requests"));

}  // namespace sok::tf
