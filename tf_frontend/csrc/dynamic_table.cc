// SPDX-License-Identifier: Apache-2.0
#include "dynamic_table.h"

#include "gpu.h"
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

void ShowColumn(::tensorflow::Var* variable, std::shared_ptr<sok_dynamic_table> table, int32_t column, bool flat) {
  const ::tensorflow::core::RefCountPtr<ColumnBuffer> buffer(new ColumnBuffer(std::move(table), column));
  *variable->tensor() = OnColumn(buffer.get(), flat);
  variable->is_initialized = true;
  variable->copy_on_read_mode.store(true);
}

void ShowGrown(::tensorflow::Var* variable) {
  Tensor* const tensor = variable->tensor();
  *tensor = OnColumn(const_cast<ColumnBuffer*>(ColumnBuffer::Of(*tensor)), tensor->dims() == 1);
}

REGISTER_OP("SokDynamicTable")
    .Input("variable: resource")
    .Input("parameters: float64")
    .Attr("table_name: string")
    .Attr("dimension: int >= 1")
    .Attr("capacity: int >= 1")
    .Attr("initial_rows: int >= 0")
    .Attr("kind: int")
    .Attr("seed: int")
    .Attr("eviction: int >= 0")
    .Attr("dtype: {float, half, bfloat16} = DT_FLOAT")
    .SetIsStateful()
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext*) { return absl::OkStatus(); })
    .Doc(
        "Makes an empty dynamic table, whose rows the variable shows from then on.\n\n"
        "variable: of the dtype and shape [None, dimension]; what it held is gone.\n"
        "parameters: [2] a and b of sok_initializer.\n"
        "table_name: for messages.\n"
        "capacity: the most rows that it may hold.\n"
        "initial_rows: for so many there is memory from the beginning.\n"
        "kind: sok_initializer_kind.\n"
        "seed: the 64 bits of the seed, as a signed number.\n"
        "eviction: sok_eviction; a table on a GPU evicts nothing in this version.\n");

class DynamicTableOp : public ::tensorflow::OpKernel {
 public:
  explicit DynamicTableOp(OpKernelConstruction* ctx)
      : OpKernel(ctx),
        name_(Attribute<std::string>(ctx, "table_name")),
        dimension_(Attribute<int64_t>(ctx, "dimension")),
        capacity_(Attribute<int64_t>(ctx, "capacity")),
        initial_rows_(Attribute<int64_t>(ctx, "initial_rows")),
        kind_(Attribute<int>(ctx, "kind")),
        seed_(Attribute<int64_t>(ctx, "seed")),
        eviction_(Attribute<int>(ctx, "eviction")),
        dtype_(Attribute<::tensorflow::DataType>(ctx, "dtype")) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& parameters = ctx->input(1);
    OP_REQUIRES(ctx, parameters.NumElements() == 2, errors::InvalidArgument("parameters must be two numbers"));
    CoreContext core(ctx);
    sok_dynamic_table_config config = SOK_DYNAMIC_TABLE_CONFIG_INIT;
    config.index.device = core.get()->device;
    config.index.capacity = capacity_;
    config.index.initial_rows = initial_rows_;
    config.index.name = name_.c_str();
    config.dimension = dimension_;
    config.dtype = View(Tensor(dtype_)).dtype;
    config.eviction = OnGpu(ctx) ? SOK_EVICT_NOTHING : eviction_;
    config.initializer.kind = kind_;
    config.initializer.seed = static_cast<uint64_t>(seed_);
    config.initializer.a = parameters.flat<double>()(0);
    config.initializer.b = parameters.flat<double>()(1);
    sok_dynamic_table* made = nullptr;
    SOK_TF_CALL(ctx, sok_dynamic_table_create(&config, &made));
    std::shared_ptr<sok_dynamic_table> table(made, sok_dynamic_table_destroy);
    VarPtr variable;
    OP_REQUIRES_OK(ctx, ::tensorflow::LookupOrCreateResource<Var>(ctx, ::tensorflow::HandleFromInput(ctx, 0), &variable,
                                                                  [this](Var** var) {
                                                                    *var = new Var(dtype_);
                                                                    return absl::OkStatus();
                                                                  }));
    const ::tensorflow::mutex_lock lock(*variable->mu());
    ShowColumn(variable.get(), std::move(table), 0, false);
  }

 private:
  std::string name_;
  int64_t dimension_, capacity_, initial_rows_;
  int kind_;
  int64_t seed_;
  int eviction_;
  ::tensorflow::DataType dtype_;
};

SOK_REGISTER_KERNELS("SokDynamicTable", DynamicTableOp, .HostMemory("parameters"));

REGISTER_OP("SokColumn")
    .Input("table: resource")
    .Input("variable: resource")
    .Attr("width: int >= 0")
    .Attr("initial: float")
    .Attr("dtype: {float, int64} = DT_FLOAT")
    .SetIsStateful()
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext*) { return absl::OkStatus(); })
    .Doc(
        "Lets a variable show a column of a dynamic table as it is now. If it shows none of this table's, the table\n"
        "gets a further one for it.\n\n"
        "table: the dynamic table.\n"
        "variable: the table itself or a variable of the dtype, [None, width], or [None] where the width is 0\n"
        "  and the column has one element a slot.\n"
        "width: of the further column.\n"
        "initial: what a slot has there when a key gets it.\n");

class ColumnOp : public ::tensorflow::OpKernel {
 public:
  explicit ColumnOp(OpKernelConstruction* ctx)
      : OpKernel(ctx),
        width_(Attribute<int64_t>(ctx, "width")),
        initial_(Attribute<float>(ctx, "initial")),
        dtype_(Attribute<::tensorflow::DataType>(ctx, "dtype")) {}

  void Compute(OpKernelContext* ctx) override {
    VariableLocks locks;
    OP_REQUIRES_OK(ctx, locks.Lock(ctx, {"table", "variable"}, VariableLocks::kExclusive));
    const ColumnBuffer* const rows = ColumnBuffer::Of(*locks.tensor(0));
    OP_REQUIRES(ctx, rows != nullptr, errors::FailedPrecondition("the variable holds no dynamic table"));
    const std::shared_ptr<sok_dynamic_table> table = rows->table();
    const ColumnBuffer* const shown = ColumnBuffer::Of(*locks.tensor(1));
    if (shown != nullptr && shown->table() == table) {
      ShowGrown(locks.variable(1));
      return;
    }
    CoreContext core(ctx);
    int32_t column = 0;
    SOK_TF_CALL(ctx, sok_dynamic_table_add_column(core.get(), table.get(), View(Tensor(dtype_)).dtype,
                                                  width_ > 0 ? width_ : 1, initial_, &column));
    ShowColumn(locks.variable(1), table, column, width_ == 0);
  }

 private:
  int64_t width_;
  float initial_;
  ::tensorflow::DataType dtype_;
};

SOK_REGISTER_KERNELS("SokColumn", ColumnOp);

}  // namespace sok::tf
