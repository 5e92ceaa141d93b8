// SPDX-License-Identifier: Apache-2.0
#include "indexed_table.h"

#include "tables.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace sok::tf {
namespace {

::tensorflow::DataType TypeOf(int32_t dtype) {
  switch (dtype) {
    case SOK_FLOAT16:
      return ::tensorflow::DT_HALF;
    case SOK_BFLOAT16:
      return ::tensorflow::DT_BFLOAT16;
    case SOK_INT64:
      return ::tensorflow::DT_INT64;
    default:
      return ::tensorflow::DT_FLOAT;
  }
}

Tensor OnColumn(ColumnBuffer* buffer, bool flat) {
  const sok_tensor column = buffer->view();
  ::tensorflow::TensorShape shape({column.shape[0]});
  if (!flat) shape.AddDim(column.shape[1]);
  return Tensor(TypeOf(column.dtype), shape, buffer);
}

}  // namespace

sok_columns IndexedTable::columns(const char* name) const {
  sok_columns columns = SOK_COLUMNS_INIT;
  columns.name = name;
  columns.weight = column(0);
  return columns;
}

const ColumnBuffer* ColumnBuffer::Of(const Tensor& tensor) {
  return dynamic_cast<const ColumnBuffer*>(::tensorflow::DMAHelper::buffer(&tensor));
}

size_t ColumnBuffer::size() const {
  const sok_tensor column = view();
  return static_cast<size_t>(column.shape[0] * column.shape[1]) * ::tensorflow::DataTypeSize(TypeOf(column.dtype));
}

sok_tensor VariableView(const Tensor& tensor) {
  const ColumnBuffer* const buffer = ColumnBuffer::Of(tensor);
  if (buffer == nullptr) return View(tensor);
  sok_tensor column = buffer->view();
  if (tensor.dims() == 1) column.rank = 1;
  return column;
}

void ShowColumn(::tensorflow::Var* variable, std::shared_ptr<IndexedTable> table, int32_t column, bool flat) {
  const ::tensorflow::core::RefCountPtr<ColumnBuffer> buffer(new ColumnBuffer(std::move(table), column));
  *variable->tensor() = OnColumn(buffer.get(), flat);
  variable->is_initialized = true;
  variable->copy_on_read_mode.store(true);
}

void ShowGrown(::tensorflow::Var* variable) {
  Tensor* const tensor = variable->tensor();
  *tensor = OnColumn(const_cast<ColumnBuffer*>(ColumnBuffer::Of(*tensor)), tensor->dims() == 1);
}

absl::Status ShowRows(OpKernelContext* ctx, const ::tensorflow::ResourceHandle& handle, ::tensorflow::DataType dtype,
                      std::shared_ptr<IndexedTable> table) {
  VarPtr variable;
  TF_RETURN_IF_ERROR(::tensorflow::LookupOrCreateResource<Var>(ctx, handle, &variable, [dtype](Var** var) {
    *var = new Var(dtype);
    return absl::OkStatus();
  }));
  const ::tensorflow::mutex_lock lock(*variable->mu());
  ShowColumn(variable.get(), std::move(table), 0, false);
  return absl::OkStatus();
}

REGISTER_OP("SokIndexedTable")
    .Input("variable: resource")
    .Attr("index: int")
    .Attr("rows: int")
    .Attr("num_slots: int >= 1")
    .Attr("dimension: int >= 1")
    .Attr("dtype: {float, half, bfloat16} = DT_FLOAT")
    .SetIsStateful()
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext*) { return absl::OkStatus(); })
    .Doc(
        "A table on the CPU whose keys all have slots that they keep, of an index and in memory that the caller has\n"
        "made. The variable shows its rows from then on.\n\n"
        "variable: of the dtype and shape [num_slots, dimension]; what it held is gone.\n"
        "index: the address of a sok_index.\n"
        "rows: the address of the rows [num_slots, dimension]. Index and rows must live as long as the variable.\n");

class IndexedTableOp : public ::tensorflow::OpKernel {
 public:
  explicit IndexedTableOp(OpKernelConstruction* ctx)
      : OpKernel(ctx),
        index_(Attribute<int64_t>(ctx, "index")),
        dtype_(Attribute<::tensorflow::DataType>(ctx, "dtype")),
        rows_{reinterpret_cast<void*>(Attribute<int64_t>(ctx, "rows")),
              View(Tensor(dtype_)).dtype,
              2,
              {Attribute<int64_t>(ctx, "num_slots"), Attribute<int64_t>(ctx, "dimension")},
              0} {
    OP_REQUIRES(ctx, index_ != 0 && rows_.data != nullptr, errors::InvalidArgument("a table needs an index and rows"));
  }

  void Compute(OpKernelContext* ctx) override {
    auto table = std::make_shared<IndexedTable>(reinterpret_cast<const sok_index*>(index_), rows_);
    OP_REQUIRES_OK(ctx, ShowRows(ctx, ::tensorflow::HandleFromInput(ctx, 0), dtype_, std::move(table)));
  }

 private:
  int64_t index_;
  ::tensorflow::DataType dtype_;
  sok_tensor rows_;
};

REGISTER_KERNEL_BUILDER(Name("SokIndexedTable").Device(::tensorflow::DEVICE_CPU), IndexedTableOp);

}  // namespace sok::tf
