// SPDX-License-Identifier: Apache-2.0
// weight_gradient: d loss / d weights of the lookups that have weights.
#include <vector>

#include "gpu.h"
#include "lookups.h"
#include "messages.h"
#include "read_by_key.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

REGISTER_OP("SokWeightGradient")
    .Input("variables: num_variables * resource")
    .SOK_LOOKUP_INPUTS.SOK_POOLED_GRADIENTS.Input("rows: float32")
    .Input("inverse: int64")
    .Input("requests: int64")
    .SOK_GENERATIONS_INPUT.Output("weight_gradients: num_weighted * float32")
    .Attr("num_variables: int >= 0")
    .SOK_TABLE_ATTRIBUTES.SOK_LOOKUP_ATTRIBUTES.SOK_BY_KEY_ATTRIBUTE
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      std::vector<::tensorflow::shape_inference::ShapeHandle> weights;
      TF_RETURN_IF_ERROR(c->input("weights", &weights));
      return weights.empty() ? absl::OkStatus() : c->set_output("weight_gradients", weights);
    })
    .Doc(
        "Gradients of the weights of a lookup.\n\n"
        "variables: the tables, when the rows are read from them as SokGatherCombine does; else "
        "none.\n" SOK_LOOKUP_INPUTS_DOC SOK_POOLED_GRADIENTS_DOC
        "rows: what SokCombine read; not used when there are variables.\n"
        "inverse: [n] what SokRoute gave; not used when there are variables.\n"
        "requests: what SokExchangeSizes had as `sent`; not used when there are variables.\n"
        "generations: none, or those of the slots: rows are refused whose slot has lost its key.\n"
        "weight_gradients: [n] for each lookup with weights.\n" SOK_TABLE_ATTRIBUTES_DOC SOK_LOOKUP_ATTRIBUTES_DOC
            SOK_BY_KEY_ATTRIBUTE_DOC);

class WeightGradientOp : public ::tensorflow::OpKernel {
 public:
  explicit WeightGradientOp(OpKernelConstruction* ctx)
      : OpKernel(ctx),
        tables_(ctx),
        lookups_(ctx, tables_.num_tables()),
        num_variables_(Attribute<int>(ctx, "num_variables")),
        by_key_(Attribute<bool>(ctx, "by_key")) {
    OP_REQUIRES(ctx, num_variables_ == 0 || num_variables_ == tables_.num_tables(),
                errors::InvalidArgument("num_variables must be 0 or num_tables"));
  }

  void Compute(OpKernelContext* ctx) override {
    const std::vector<sok_placement>& tables = tables_.tables();
    std::vector<sok_lookup> lookups;
    std::vector<sok_tensor> output_gradients;
    OP_REQUIRES_OK(ctx, lookups_.Read(ctx, tables, &lookups));
    OP_REQUIRES_OK(ctx, ReadOutputGradients(ctx, tables, lookups, &output_gradients));
    ::tensorflow::OpOutputList outputs;
    OP_REQUIRES_OK(ctx, ctx->output_list("weight_gradients", &outputs));
    std::vector<sok_tensor> gradients(lookups.size(), Absent());
    for (int i = 0, next = 0; i < lookups_.num_lookups(); ++i) {
      if (!lookups_.weighted(i)) continue;
      Tensor* output = nullptr;
      OP_REQUIRES_OK(ctx, outputs.allocate(next++, {lookups[i].keys.shape[0]}, &output));
      gradients[i] = View(*output);
    }
    const int32_t num_lookups = lookups_.num_lookups();
    CoreContext core(ctx);
    if (num_variables_ > 0) {
      VariableLocks locks;
      std::vector<sok_columns> columns;
      OP_REQUIRES_OK(ctx, locks.Lock(ctx, {"variables"}, VariableLocks::kShared));
      OP_REQUIRES_OK(ctx, ReadColumns(&locks, tables_, &columns));
      RowsByKey rows;
      OP_REQUIRES_OK(ctx, SetGenerations(ctx, &lookups));
      if (by_key_) OP_REQUIRES_OK(ctx, rows.Read(ctx, core.get(), tables_, &numbers_, &locks, &columns, &lookups));
      SOK_TF_CALL(ctx, sok_weight_gradient(core.get(), static_cast<int32_t>(columns.size()), columns.data(),
                                           num_lookups, lookups.data(), output_gradients.data(), gradients.data()));
      return;
    }
    const Tensor *floats, *inverse, *requests;
    OP_REQUIRES_OK(ctx, ctx->input("rows", &floats));
    OP_REQUIRES_OK(ctx, ctx->input("inverse", &inverse));
    OP_REQUIRES_OK(ctx, ctx->input("requests", &requests));
    Messages messages;
    OP_REQUIRES_OK(ctx, messages.Read(*requests, tables_.dimensions(), lookups_.tables()));
    SOK_TF_CALL(ctx, sok_weight_gradient_of_rows(core.get(), tables_.num_tables(), tables.data(), num_lookups,
                                                 lookups.data(), output_gradients.data(), messages.get(),
                                                 View(*inverse), View(*floats), gradients.data()));
  }

 private:
  absl::Status SetGenerations(OpKernelContext* ctx, std::vector<sok_lookup>* lookups) const {
    ::tensorflow::OpInputList generations;
    TF_RETURN_IF_ERROR(ctx->input_list("generations", &generations));
    if (generations.size() == 0) return absl::OkStatus();
    const auto of_indexed = generations[0].flat<int64_t>();
    if (of_indexed.size() != tables_.num_indexed()) {
      return errors::InvalidArgument("generations need an element for each table with an index");
    }
    for (sok_lookup& lookup : *lookups) {
      if (tables_.is_indexed(lookup.table)) lookup.generation = of_indexed(tables_.place(lookup.table));
    }
    return absl::OkStatus();
  }

  TableAttributes tables_;
  LookupAttributes lookups_;
  int num_variables_;
  bool by_key_;
  Numbers numbers_;
};

SOK_REGISTER_KERNELS("SokWeightGradient", WeightGradientOp, .HostMemory("requests").HostMemory("generations"));

}  // namespace sok::tf
