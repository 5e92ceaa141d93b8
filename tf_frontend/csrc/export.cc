// SPDX-License-Identifier: Apache-2.0
// table_size, export: what a dynamic table holds.
#include "device_errors.h"
#include "dynamic_table.h"
#include "gpu.h"
#include "tables.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

REGISTER_OP("SokTableSize")
    .Input("tables: num_tables * resource")
    .Output("size: int64")
    .SOK_TABLE_ATTRIBUTES.SetShapeFn(::tensorflow::shape_inference::ScalarShape)
    .Doc(
        "How many keys a dynamic table holds on this rank. On a GPU it waits.\n\n"
        "tables: the table.\n"
        "size: in host memory.\n" SOK_TABLE_ATTRIBUTES_DOC);

REGISTER_OP("SokExport")
    .Input("tables: num_tables * resource")
    .Output("keys: int64")
    .Output("rows: dtype")
    .SOK_TABLE_ATTRIBUTES.Attr("dtype: {float, half, bfloat16}")
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      std::vector<int64_t> dimensions;
      TF_RETURN_IF_ERROR(c->GetAttr("dimensions", &dimensions));
      if (dimensions.size() != 1) return errors::InvalidArgument("SokExport takes one table");
      const auto n = c->UnknownDim();
      c->set_output(0, c->Vector(n));
      c->set_output(1, c->Matrix(n, dimensions[0]));
      return absl::OkStatus();
    })
    .Doc(
        "The keys that a dynamic table holds on this rank, and their rows. On a GPU it waits.\n\n"
        "tables: the table.\n"
        "keys: [n] in the order of their slots.\n"
        "rows: [n, dimension].\n" SOK_TABLE_ATTRIBUTES_DOC);

namespace {

// The dynamic table of an op that takes one.
class OneTable {
 public:
  explicit OneTable(OpKernelConstruction* ctx) : attributes_(ctx) {
    if (attributes_.num_tables() != 1 || !IsDynamic(attributes_.tables().front())) {
      ctx->CtxFailure(errors::InvalidArgument("the op takes one dynamic table"));
    }
  }

  absl::Status Lock(OpKernelContext* ctx, VariableLocks* locks, sok_dynamic_table** table) const {
    TF_RETURN_IF_ERROR(locks->Lock(ctx, {"tables"}, VariableLocks::kShared));
    std::vector<sok_columns> columns;
    TF_RETURN_IF_ERROR(ReadColumns(locks, attributes_.tables(), &columns));
    *table = ColumnBuffer::Of(*locks->tensor(0))->table().get();
    return absl::OkStatus();
  }

 private:
  TableAttributes attributes_;
};

}  // namespace

class TableSizeOp : public ::tensorflow::OpKernel {
 public:
  explicit TableSizeOp(OpKernelConstruction* ctx) : OpKernel(ctx), table_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    VariableLocks locks;
    sok_dynamic_table* table = nullptr;
    OP_REQUIRES_OK(ctx, table_.Lock(ctx, &locks, &table));
    Tensor* size = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &size));
    CoreContext core(ctx);
    SOK_TF_CALL(ctx, sok_hash_index_size(core.get(), sok_dynamic_table_hash_index(table), &size->scalar<int64_t>()()));
    OP_REQUIRES_OK(ctx, CheckDevice(ctx));
  }

 private:
  OneTable table_;
};

SOK_REGISTER_KERNELS("SokTableSize", TableSizeOp, .HostMemory("size"));

class ExportOp : public ::tensorflow::OpKernel {
 public:
  explicit ExportOp(OpKernelConstruction* ctx) : OpKernel(ctx), table_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    VariableLocks locks;
    sok_dynamic_table* table = nullptr;
    OP_REQUIRES_OK(ctx, table_.Lock(ctx, &locks, &table));
    OP_REQUIRES_OK(ctx, WaitAndCheckDevice(ctx));
    const sok_hash_index* const index = sok_dynamic_table_hash_index(table);
    const int64_t num_slots = sok_hash_index_num_slots(index);
    Tensor keys, slots, count;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(::tensorflow::DT_INT64, {num_slots}, &keys));
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(::tensorflow::DT_INT64, {num_slots}, &slots));
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(::tensorflow::DT_INT64, {1}, &count));
    CoreContext core(ctx);
    SOK_TF_CALL(ctx, sok_hash_index_export(core.get(), index, 0, View(keys), View(slots), View(count)));
    Tensor on_host;
    OP_REQUIRES_OK(ctx, AllocateHost(ctx, ::tensorflow::DT_INT64, {1}, &on_host));
    OP_REQUIRES_OK(ctx, OnGpu(ctx) ? CopyToHost(ctx, count, &on_host) : CopyOnDevice(ctx, count, &on_host));
    const Tensor held = keys.Slice(0, on_host.flat<int64_t>()(0));
    Tensor* rows = nullptr;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(1, {held.dim_size(0), sok_dynamic_table_column(table, 0).shape[1]}, &rows));
    ctx->set_output(0, held);
    SOK_TF_CALL(ctx, sok_dynamic_table_read(core.get(), table, View(held), View(*rows)));
  }

 private:
  OneTable table_;
};

SOK_REGISTER_KERNELS("SokExport", ExportOp);

}  // namespace sok::tf
