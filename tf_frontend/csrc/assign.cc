// SPDX-License-Identifier: Apache-2.0
// assign: writes rows by global key.
#include "device_errors.h"
#include "dynamic_table.h"
#include "gpu.h"
#include "tables.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

REGISTER_OP("SokAssign")
    .Input("tables: num_tables * resource")
    .Input("target: resource")
    .Input("keys: key_type")
    .Input("values: value_type")
    .Output("slots: int64")
    .SOK_TABLE_ATTRIBUTES.Attr("key_type: {int32, int64}")
    .Attr("value_type: {float, half, bfloat16}")
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      std::vector<::tensorflow::shape_inference::ShapeHandle> keys, values;
      ::tensorflow::shape_inference::ShapeHandle ignored;
      TF_RETURN_IF_ERROR(c->input("keys", &keys));
      TF_RETURN_IF_ERROR(c->input("values", &values));
      TF_RETURN_IF_ERROR(c->WithRank(keys[0], 1, &keys[0]));
      c->set_output(0, keys[0]);
      return c->WithRank(values[0], 2, &ignored);
    })
    .Doc(
        "Overwrites the rows of global keys that this rank holds; of equal keys the last one counts. A dynamic table\n"
        "takes up those that it lacks. On a GPU it waits until the keys have been looked at.\n\n"
        "tables: the table.\n"
        "target: the table, or an optimizer state of its shape.\n"
        "keys: [n] keys that belong to this rank.\n"
        "values: [n, dimension] of the target's dtype, or float32, which is rounded.\n"
        "slots: [n] where the rows are.\n" SOK_TABLE_ATTRIBUTES_DOC);

class AssignOp : public ::tensorflow::OpKernel {
 public:
  explicit AssignOp(OpKernelConstruction* ctx) : OpKernel(ctx), tables_(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckDevice(ctx));
    const Tensor *keys, *values;
    OP_REQUIRES_OK(ctx, ctx->input("keys", &keys));
    OP_REQUIRES_OK(ctx, ctx->input("values", &values));
    const sok_placement& table = tables_.tables().front();
    OP_REQUIRES(
        ctx,
        values->dims() == 2 && values->dim_size(0) == keys->NumElements() && values->dim_size(1) == table.dimension,
        errors::InvalidArgument("table '", table.name, "': values of the shape ", values->shape().DebugString(),
                                " for ", keys->NumElements(), " keys and the dimension ", table.dimension));
    VariableLocks locks;
    OP_REQUIRES_OK(ctx, locks.Lock(ctx, {"tables", "target"}, VariableLocks::kExclusive));
    IndexedTable* indexed = nullptr;
    if (tables_.is_indexed(0)) OP_REQUIRES_OK(ctx, FindIndexed(table, *locks.tensor(0), &indexed));
    const sok_index* const index = indexed == nullptr ? nullptr : indexed->index();
    CoreContext core(ctx);
    Tensor* slots = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, keys->shape(), &slots));
    sok_lookup lookup = SOK_LOOKUP_INIT;
    lookup.keys = View(*keys);
    lookup.slots = View(*slots);
    OP_REQUIRES_OK(ctx, OfMemory(ctx, SOK_TF_STATUS(sok_locate(core.get(), 1, &table, &index, 1, &lookup,
                                                               SOK_LOCATE_INSERT | SOK_LOCATE_BESIDE))));
    if (indexed != nullptr) ShowGrown(locks.variable(0));
    std::vector<sok_columns> columns;
    OP_REQUIRES_OK(ctx, ReadColumns(&locks, tables_, &columns));
    SOK_TF_CALL(ctx, sok_assign(core.get(), &columns[0], lookup.slots, View(*values), VariableView(*locks.tensor(1))));
    OP_REQUIRES_OK(ctx, WaitAndCheckDevice(ctx));
  }

 private:
  TableAttributes tables_;
};

SOK_REGISTER_KERNELS("SokAssign", AssignOp);

}  // namespace sok::tf
