// SPDX-License-Identifier: Apache-2.0
// reduce: the gradient of one table, materialised.
#include "device_errors.h"
#include "gpu.h"
#include "gradients.h"
#include "tables.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

REGISTER_OP("SokReduce")
    .Input("tables: num_tables * resource")
    .SOK_GRADIENT_INPUTS.Output("unique_slots: int64")
    .Output("gradients: float32")
    .SOK_TABLE_ATTRIBUTES.SOK_GRADIENT_ATTRIBUTES
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      std::vector<int64_t> dimensions;
      TF_RETURN_IF_ERROR(c->GetAttr("dimensions", &dimensions));
      if (dimensions.size() != 1) return errors::InvalidArgument("SokReduce takes one table");
      const auto rows = c->UnknownDim();
      c->set_output(0, c->Vector(rows));
      c->set_output(1, c->Matrix(rows, dimensions[0]));
      return absl::OkStatus();
    })
    .Doc(
        "Sums the summands of one table's gradient: one row for each distinct slot. On a GPU it waits for their "
        "number.\n\n"
        "tables: the table.\n" SOK_GRADIENT_INPUTS_DOC
        "unique_slots: [u] ascending.\n"
        "gradients: [u, dimension].\n" SOK_TABLE_ATTRIBUTES_DOC SOK_GRADIENT_ATTRIBUTES_DOC);

class ReduceOp : public ::tensorflow::OpKernel {
 public:
  explicit ReduceOp(OpKernelConstruction* ctx) : OpKernel(ctx), tables_(ctx), gradients_(ctx, tables_.dimensions()) {}

  void Compute(OpKernelContext* ctx) override {
    std::vector<std::vector<sok_gradient>> summands;
    OP_REQUIRES_OK(ctx, gradients_.Read(ctx, &summands));
    int64_t n = 0;
    for (const sok_gradient& summand : summands[0]) n += summand.slots.shape[0];
    VariableLocks locks;
    OP_REQUIRES_OK(ctx, locks.Lock(ctx, {"tables"}, VariableLocks::kShared));
    std::vector<sok_columns> columns;
    OP_REQUIRES_OK(ctx, ReadColumns(&locks, tables_, &columns));
    Tensor slots, values;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(::tensorflow::DT_INT64, {n}, &slots));
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(::tensorflow::DT_FLOAT, {n, tables_.dimensions()[0]}, &values));
    Tensor count;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(::tensorflow::DT_INT64, {1}, &count));
    CoreContext core(ctx);
    SOK_TF_CALL(ctx, sok_reduce(core.get(), &columns[0], static_cast<int32_t>(summands[0].size()), summands[0].data(),
                                View(slots), View(values), View(count)));
    if (OnGpu(ctx)) {
      // The one wait of an op: outputs of the right size need the number.
      Tensor on_host;
      OP_REQUIRES_OK(ctx, AllocateHost(ctx, ::tensorflow::DT_INT64, {1}, &on_host));
      OP_REQUIRES_OK(ctx, CopyToHost(ctx, count.data(), &on_host));
      OP_REQUIRES_OK(ctx, CheckDevice(ctx));
      count = on_host;
    }
    const int64_t rows = count.flat<int64_t>()(0);
    ctx->set_output(0, slots.Slice(0, rows));
    ctx->set_output(1, values.Slice(0, rows));
  }

 private:
  TableAttributes tables_;
  GradientAttributes gradients_;
};

SOK_REGISTER_KERNELS("SokReduce", ReduceOp, .HostMemory("exchanged_counts").HostMemory("generations"));

}  // namespace sok::tf
