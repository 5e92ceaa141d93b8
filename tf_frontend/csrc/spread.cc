// SPDX-License-Identifier: Apache-2.0
// spread: output gradients -> one gradient for each unique key and for each part of a bag, in send order.
#include "gpu.h"
#include "lookups.h"
#include "messages.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

REGISTER_OP("SokSpread")
    .SOK_LOOKUP_INPUTS.SOK_POOLED_GRADIENTS.Input("inverse: int64")
    .Input("order: int32")
    .Input("unique_splits: int32")
    .Input("requests: int64")
    .Output("gradients: float32")
    .SOK_TABLE_ATTRIBUTES.SOK_LOOKUP_ATTRIBUTES
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc("Gradients of the rows and sums that SokCombine read.\n\n" SOK_LOOKUP_INPUTS_DOC SOK_POOLED_GRADIENTS_DOC
         "inverse: [n] what SokRoute gave.\n"
         "order: [n] what SokRoute gave.\n"
         "unique_splits: [n + 1] what SokRoute gave.\n"
         "requests: what SokExchangeSizes had as `sent`.\n"
         "gradients: flat, laid out as the rows that SokCombine read.\n" SOK_TABLE_ATTRIBUTES_DOC
             SOK_LOOKUP_ATTRIBUTES_DOC);

class SpreadOp : public ::tensorflow::OpKernel {
 public:
  explicit SpreadOp(OpKernelConstruction* ctx) : OpKernel(ctx), tables_(ctx), lookups_(ctx, tables_.num_tables()) {}

  void Compute(OpKernelContext* ctx) override {
    const std::vector<sok_placement>& tables = tables_.tables();
    std::vector<sok_lookup> lookups;
    std::vector<sok_tensor> output_gradients;
    OP_REQUIRES_OK(ctx, lookups_.Read(ctx, tables, &lookups));
    OP_REQUIRES_OK(ctx, ReadOutputGradients(ctx, tables, lookups, &output_gradients));
    const Tensor *inverse, *order, *unique_splits, *requests;
    OP_REQUIRES_OK(ctx, ctx->input("inverse", &inverse));
    OP_REQUIRES_OK(ctx, ctx->input("order", &order));
    OP_REQUIRES_OK(ctx, ctx->input("unique_splits", &unique_splits));
    OP_REQUIRES_OK(ctx, ctx->input("requests", &requests));
    Messages messages;
    OP_REQUIRES_OK(ctx, messages.Read(*requests, tables_.dimensions(), lookups_.tables()));
    Tensor* floats = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {messages->num_floats}, &floats));
    sok_routing routing = SOK_ROUTING_INIT;
    routing.inverse = View(*inverse);
    routing.order = View(*order);
    routing.unique_splits = View(*unique_splits);
    CoreContext core(ctx);
    SOK_TF_CALL(ctx, sok_spread(core.get(), tables_.num_tables(), tables.data(), lookups_.num_lookups(), lookups.data(),
                                output_gradients.data(), messages.get(), &routing, View(*floats)));
  }

 private:
  TableAttributes tables_;
  LookupAttributes lookups_;
};

SOK_REGISTER_KERNELS("SokSpread", SpreadOp, .HostMemory("requests"));

}  // namespace sok::tf
