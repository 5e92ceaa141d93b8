// SPDX-License-Identifier: Apache-2.0
// write_slots: rows by slot into a variable that a table's rows, states or stamps are in. TensorFlow's ScatterUpdate
// keeps slots in 32 bits on a GPU, and leaves out those from 2^31 on; its ScatterNdUpdate ends the process there.
#include "device_errors.h"
#include "gpu.h"
#include "indexed_table.h"
#include "one_table.h"
#include "tables.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {
namespace {

// [n] as [n, 1], and int64 as two float32: what sok_assign copies.
sok_tensor Matrix(sok_tensor tensor) {
  if (tensor.rank == 1) {
    tensor.rank = 2;
    tensor.shape[1] = tensor.row_stride = 1;
  }
  if (tensor.dtype == SOK_INT64) {
    tensor.dtype = SOK_FLOAT32;
    tensor.shape[1] *= 2;
    tensor.row_stride *= 2;
  }
  return tensor;
}

}  // namespace

REGISTER_OP("SokWriteSlots")
    .Input("variable: resource")
    .Input("slots: int64")
    .Input("rows: dtype")
    .Attr("dtype: {float, half, bfloat16, int64}")
    .Attr("table_name: string")
    .SetShapeFn(NoOutputs)
    .Doc(
        "Overwrites rows of a variable by slot; of equal slots the last one counts.\n\n"
        "variable: [slots] or [slots, width], of a table's rows, states or stamps.\n"
        "slots: [n] in the variable.\n"
        "rows: [n] or [n, width].\n"
        "table_name: for messages.");

class WriteSlotsOp : public ::tensorflow::OpKernel {
 public:
  explicit WriteSlotsOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), table_name_(Attribute<std::string>(ctx, "table_name")) {}

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckDevice(ctx));
    const Tensor *slots, *rows;
    OP_REQUIRES_OK(ctx, ctx->input("slots", &slots));
    OP_REQUIRES_OK(ctx, ctx->input("rows", &rows));
    VariableLocks locks;
    OP_REQUIRES_OK(ctx, locks.Lock(ctx, {"variable"}, VariableLocks::kExclusive));
    const Tensor& variable = *locks.tensor(0);
    OP_REQUIRES(
        ctx,
        slots->dims() == 1 && rows->dims() == variable.dims() && rows->dims() >= 1 && rows->dims() <= 2 &&
            rows->dtype() == variable.dtype() && rows->dim_size(0) == slots->NumElements(),
        errors::InvalidArgument("table '", table_name_, "': rows of the shape ", rows->shape().DebugString(), " for ",
                                slots->NumElements(), " slots of a variable of ", variable.shape().DebugString()));
    if (slots->NumElements() == 0) return;
    sok_columns columns = SOK_COLUMNS_INIT;
    columns.name = table_name_.c_str();
    columns.weight = Matrix(VariableView(variable));
    const CoreContext core(ctx);
    SOK_TF_CALL(ctx, sok_assign(core.get(), &columns, View(*slots), Matrix(View(*rows)), columns.weight));
  }

 private:
  std::string table_name_;
};

SOK_REGISTER_KERNELS("SokWriteSlots", WriteSlotsOp);

}  // namespace sok::tf
