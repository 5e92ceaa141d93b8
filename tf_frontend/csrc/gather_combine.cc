// SPDX-License-Identifier: Apache-2.0
// gather_combine: the whole forward pass where one process holds the tables.
#include "device_errors.h"
#include "gpu.h"
#include "lookups.h"
#include "read_by_key.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

REGISTER_OP("SokGatherCombine")
    .Input("tables: num_tables * resource")
    .SOK_LOOKUP_INPUTS.SOK_GENERATIONS_INPUT.SOK_POOLED_OUTPUTS.SOK_TABLE_ATTRIBUTES.SOK_LOOKUP_ATTRIBUTES
    .SOK_BY_KEY_ATTRIBUTE.SetShapeFn(LookupOutputShapes)
    .Doc(
        "Looks up rows and pools them in one pass, where one process holds all tables.\n\n"
        "tables: float32, float16 or bfloat16 variables of shape [num_rows, dimension].\n" SOK_LOOKUP_INPUTS_DOC
            SOK_GENERATIONS_INPUT_DOC SOK_POOLED_OUTPUTS_DOC SOK_TABLE_ATTRIBUTES_DOC SOK_LOOKUP_ATTRIBUTES_DOC
                SOK_BY_KEY_ATTRIBUTE_DOC);

class GatherCombineOp : public ::tensorflow::OpKernel {
 public:
  explicit GatherCombineOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), tables_(ctx), lookups_(ctx, tables_.num_tables()), by_key_(Attribute<bool>(ctx, "by_key")) {}

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckDevice(ctx));
    std::vector<sok_lookup> lookups;
    OP_REQUIRES_OK(ctx, lookups_.Read(ctx, tables_.tables(), &lookups));
    OP_REQUIRES_OK(ctx, AllocateOutputs(ctx, tables_.tables(), &lookups));
    VariableLocks locks;
    OP_REQUIRES_OK(ctx, locks.Lock(ctx, {"tables"}, VariableLocks::kShared));
    std::vector<sok_columns> columns;
    OP_REQUIRES_OK(ctx, ReadColumns(&locks, tables_, &columns));
    CoreContext core(ctx);
    RowsByKey rows;
    if (by_key_) OP_REQUIRES_OK(ctx, rows.Read(ctx, core.get(), tables_, &numbers_, &locks, &columns, &lookups));
    SOK_TF_CALL(ctx, sok_gather_combine(core.get(), static_cast<int32_t>(columns.size()), columns.data(),
                                        lookups_.num_lookups(), lookups.data()));
  }

 private:
  TableAttributes tables_;
  LookupAttributes lookups_;
  bool by_key_;
  Numbers numbers_;
};

SOK_REGISTER_KERNELS("SokGatherCombine", GatherCombineOp, .HostMemory("generations"));

}  // namespace sok::tf
