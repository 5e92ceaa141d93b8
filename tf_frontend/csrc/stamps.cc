// SPDX-License-Identifier: Apache-2.0
// stamps: the variables that hold the stamps of several tables -> one resource.
#include "stamps.h"

#include "gpu.h"
#include "indexed_table.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace sok::tf {

std::vector<int> Stamps::AddTo(VariableLocks* locks, size_t num_tables) const {
  std::vector<int> places(num_tables, -1);
  for (size_t i = 0; i < num_tables && i < variables_.size(); ++i) {
    Var* const variable = variables_[i].get();
    if (variable == nullptr) continue;
    {
      const ::tensorflow::tf_shared_lock lock(*variable->mu());
      const Tensor& held = *variable->tensor();
      if (held.NumElements() == 0 && ColumnBuffer::Of(held) == nullptr) continue;
    }
    variable->Ref();
    places[i] = locks->size();
    locks->Add(VarPtr(variable), "stamps");
  }
  return places;
}

REGISTER_OP("SokStamps")
    .Input("variables: num_tables * resource")
    .Output("stamps: resource")
    .Attr("num_tables: int >= 0")
    .SetIsStateful()
    .SetShapeFn(::tensorflow::shape_inference::ScalarShape)
    .Doc(
        "The stamps of several tables as one resource, for SokApply.\n\n"
        "variables: int64, [rows of the table], or [0] while nobody wants to know; also one that is not made.\n"
        "stamps: keeps the variables.\n");

class StampsOp : public ::tensorflow::OpKernel {
 public:
  explicit StampsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    std::vector<VarPtr> variables(ctx->num_inputs());
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      const absl::Status found = LookupResource(ctx, ::tensorflow::HandleFromInput(ctx, i), &variables[i]);
      // A session may initialise the tables alone.
      if (!absl::IsNotFound(found)) OP_REQUIRES_OK(ctx, found);
    }
    Tensor* stamps = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &stamps));
    stamps->scalar<::tensorflow::ResourceHandle>()() =
        ::tensorflow::ResourceHandle::MakeRefCountingHandle(new Stamps(std::move(variables)), ctx->device()->name());
  }
};

SOK_REGISTER_KERNELS("SokStamps", StampsOp);

}  // namespace sok::tf
