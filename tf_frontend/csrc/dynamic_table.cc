// SPDX-License-Identifier: Apache-2.0
#include "dynamic_table.h"

#include <cstring>

#include "gpu.h"
#include "tables.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace sok::tf {
DynamicTable::DynamicTable(OpKernelContext* ctx, sok_dynamic_table* table) : table_(table), gpu_(ctx) {
  columns_.push_back({::tensorflow::DT_INVALID, 0, 0, true});  // the rows
}

DynamicTable::~DynamicTable() {
  gpu_.Wait();
  sok_dynamic_table_destroy(table_);
}

absl::Status DynamicTable::TakeColumn(OpKernelContext* ctx, ::tensorflow::DataType dtype, int64_t width, float initial,
                                      int32_t* column) {
  CoreContext core(ctx);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 1; i < columns_.size(); ++i) {
    Column& given_up = columns_[i];
    if (given_up.is_shown || given_up.dtype != dtype || given_up.width != width || given_up.initial != initial)
      continue;
    *column = static_cast<int32_t>(i);
    const sok_tensor memory = sok_dynamic_table_column(table_, *column);
    const size_t bytes = static_cast<size_t>(memory.shape[0] * width) * ::tensorflow::DataTypeSize(dtype);
    uint32_t pattern = 0;
    if (dtype == ::tensorflow::DT_FLOAT) std::memcpy(&pattern, &initial, sizeof(pattern));
    TF_RETURN_IF_ERROR(Fill(ctx, memory.data, pattern, bytes));
    given_up.is_shown = true;
    return absl::OkStatus();
  }
  TF_RETURN_IF_ERROR(OfMemory(ctx, SOK_TF_STATUS(sok_dynamic_table_add_column(
                                       core.get(), table_, View(Tensor(dtype)).dtype, width, initial, column))));
  columns_.push_back({dtype, width, initial, true});
  return absl::OkStatus();
}

void DynamicTable::Release(int32_t column) {
  const std::lock_guard<std::mutex> lock(mutex_);
  columns_[column].is_shown = false;
}

std::shared_ptr<DynamicTable> DynamicTable::Of(const Tensor& tensor) {
  const ColumnBuffer* const buffer = ColumnBuffer::Of(tensor);
  return buffer == nullptr ? nullptr : std::dynamic_pointer_cast<DynamicTable>(buffer->table());
}

absl::Status DynamicTable::Read(const sok_context* core, sok_tensor keys, sok_tensor rows) const {
  return SOK_TF_STATUS(sok_dynamic_table_read(core, table_, keys, rows));
}

absl::Status DynamicTable::TakeBack(const sok_context* core, sok_tensor keys, sok_tensor slots) {
  const auto* const since = static_cast<const int32_t*>(sok_dynamic_table_columns(table_).since.data);
  std::vector<int64_t> given_up;
  for (int64_t i = 0; i < keys.shape[0]; ++i) {
    const int64_t slot = static_cast<const int64_t*>(slots.data)[i];
    if (slot >= 0 && since[slot] == generation()) given_up.push_back(static_cast<const int64_t*>(keys.data)[i]);
  }
  std::vector<int64_t> erased(given_up.size());
  const auto n = static_cast<int64_t>(given_up.size());
  const auto view = [n](std::vector<int64_t>& of) { return sok_tensor{of.data(), SOK_INT64, 1, {n, 1}, 0}; };
  return n == 0 ? absl::OkStatus() : SOK_TF_STATUS(sok_dynamic_table_erase(core, table_, view(given_up), view(erased)));
}

REGISTER_OP("SokDynamicTable")
    .Input("variable: resource")
    .Input("parameters: float64")
    .Input("policy: float64")
    .Attr("table_name: string")
    .Attr("dimension: int >= 1")
    .Attr("capacity: int >= 1")
    .Attr("initial_rows: int >= 0")
    .Attr("kind: int")
    .Attr("seed: int")
    .Attr("dtype: {float, half, bfloat16} = DT_FLOAT")
    .SetIsStateful()
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext*) { return absl::OkStatus(); })
    .Doc(
        "Makes an empty dynamic table, whose rows the variable shows from then on.\n\n"
        "variable: of the dtype and shape [None, dimension]; what it held is gone.\n"
        "parameters: [2] a and b of sok_initializer.\n"
        "policy: [7] Policy in sparse_operation_kit/dynamic.py.\n"
        "table_name: for messages.\n"
        "capacity: the most rows that it may hold.\n"
        "initial_rows: for so many there is memory from the beginning.\n"
        "kind: sok_initializer_kind.\n"
        "seed: the 64 bits of the seed, as a signed number.\n");

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
        dtype_(Attribute<::tensorflow::DataType>(ctx, "dtype")) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& parameters = ctx->input(1);
    OP_REQUIRES(ctx, parameters.NumElements() == 2, errors::InvalidArgument("parameters must be two numbers"));
    OP_REQUIRES(ctx, ctx->input(2).NumElements() == 7, errors::InvalidArgument("policy must be seven numbers"));
    const auto policy = ctx->input(2).flat<double>();
    CoreContext core(ctx);
    sok_dynamic_table_config config = SOK_DYNAMIC_TABLE_CONFIG_INIT;
    config.index.device = core.get()->device;
    config.index.capacity = capacity_;
    config.index.initial_rows = initial_rows_;
    config.index.name = name_.c_str();
    config.dimension = dimension_;
    config.dtype = View(Tensor(dtype_)).dtype;
    config.eviction = static_cast<int32_t>(policy(0));
    config.half_life = static_cast<int64_t>(policy(1));
    config.admission = {static_cast<int64_t>(policy(2)), static_cast<int64_t>(policy(3)), policy(4)};
    config.time_to_live = policy(5);
    config.device_rows = static_cast<int64_t>(policy(6));
    config.initializer.kind = kind_;
    config.initializer.seed = static_cast<uint64_t>(seed_);
    config.initializer.a = parameters.flat<double>()(0);
    config.initializer.b = parameters.flat<double>()(1);
    sok_dynamic_table* made = nullptr;
    OP_REQUIRES_OK(ctx, OfMemory(ctx, SOK_TF_STATUS(sok_dynamic_table_create(&config, &made))));
    auto table = std::make_shared<DynamicTable>(ctx, made);
    OP_REQUIRES_OK(ctx, ShowRows(ctx, ::tensorflow::HandleFromInput(ctx, 0), dtype_, std::move(table)));
  }

 private:
  std::string name_;
  int64_t dimension_, capacity_, initial_rows_;
  int kind_;
  int64_t seed_;
  ::tensorflow::DataType dtype_;
};

SOK_REGISTER_KERNELS("SokDynamicTable", DynamicTableOp, .HostMemory("parameters").HostMemory("policy"));

REGISTER_OP("SokColumn")
    .Input("table: resource")
    .Input("variable: resource")
    .Output("added: bool")
    .Attr("width: int >= 0")
    .Attr("initial: float")
    .Attr("dtype: {float, int64} = DT_FLOAT")
    .Attr("add: bool = true")
    .SetIsStateful()
    .SetShapeFn(::tensorflow::shape_inference::ScalarShape)
    .Doc(
        "Lets a variable show a column of a dynamic table as it is now. If it shows none of this table's, the table\n"
        "gets a further one for it.\n\n"
        "table: the dynamic table.\n"
        "variable: the table itself or a variable of the dtype, [None, width], or [None] where the width is 0\n"
        "  and the column has one element a slot.\n"
        "added: whether the column is a further one, in host memory.\n"
        "width: of the further column.\n"
        "initial: what a slot has there when a key gets it.\n"
        "add: if not, a variable that shows none of the table's columns stays as it is.\n");

class ColumnOp : public ::tensorflow::OpKernel {
 public:
  explicit ColumnOp(OpKernelConstruction* ctx)
      : OpKernel(ctx),
        width_(Attribute<int64_t>(ctx, "width")),
        initial_(Attribute<float>(ctx, "initial")),
        dtype_(Attribute<::tensorflow::DataType>(ctx, "dtype")),
        add_(Attribute<bool>(ctx, "add")) {}

  void Compute(OpKernelContext* ctx) override {
    Tensor* added = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &added));
    added->scalar<bool>()() = false;
    VariableLocks locks;
    OP_REQUIRES_OK(ctx, locks.Lock(ctx, {"table", "variable"}, VariableLocks::kExclusive));
    const std::shared_ptr<DynamicTable> table = DynamicTable::Of(*locks.tensor(0));
    OP_REQUIRES(ctx, table != nullptr, errors::FailedPrecondition("the variable holds no dynamic table"));
    const ColumnBuffer* const shown = ColumnBuffer::Of(*locks.tensor(1));
    if (shown != nullptr && shown->table() == table) {
      ShowGrown(locks.variable(1));
    } else if (add_) {
      int32_t column = 0;
      OP_REQUIRES_OK(ctx, table->TakeColumn(ctx, dtype_, width_ > 0 ? width_ : 1, initial_, &column));
      ShowColumn(locks.variable(1), table, column, width_ == 0);
      added->scalar<bool>()() = true;
    }
  }

 private:
  int64_t width_;
  float initial_;
  ::tensorflow::DataType dtype_;
  bool add_;
};

SOK_REGISTER_KERNELS("SokColumn", ColumnOp, .HostMemory("added"));

}  // namespace sok::tf
