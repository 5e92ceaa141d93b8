// SPDX-License-Identifier: Apache-2.0
#include "one_table.h"

#include <algorithm>
#include <vector>

#include "device_errors.h"
#include "dynamic_table.h"
#include "gpu.h"

namespace sok::tf {

OneTableOp::OneTableOp(OpKernelConstruction* ctx, VariableLocks::Mode mode)
    : OpKernel(ctx), attributes_(ctx), mode_(mode) {
  OP_REQUIRES(ctx, attributes_.num_tables() == 1 && attributes_.is_indexed(0),
              errors::InvalidArgument("the op takes one dynamic table"));
}

void OneTableOp::Compute(OpKernelContext* ctx) {
  OP_REQUIRES_OK(ctx, CheckDevice(ctx));
  VariableLocks locks;
  OP_REQUIRES_OK(ctx, locks.Lock(ctx, {"tables"}, mode_));
  IndexedTable* indexed = nullptr;
  OP_REQUIRES_OK(ctx, FindIndexed(placement(), *locks.tensor(0), &indexed));
  auto* const table = dynamic_cast<DynamicTable*>(indexed);
  OP_REQUIRES(ctx, table != nullptr,
              errors::InvalidArgument("table '", placement().name, "' must be dynamic, which it is not"));
  CoreContext core(ctx);
  OP_REQUIRES_OK(ctx, OfMemory(ctx, Run(ctx, core.get(), table->get())));
  if (mode_ == VariableLocks::kExclusive) ShowGrown(locks.variable(0));
}

absl::Status NoOutputs(::tensorflow::shape_inference::InferenceContext*) { return absl::OkStatus(); }

absl::Status RowsOfTable(::tensorflow::shape_inference::InferenceContext* c, int output,
                         ::tensorflow::shape_inference::DimensionHandle n) {
  std::vector<int64_t> dimensions;
  TF_RETURN_IF_ERROR(c->GetAttr("dimensions", &dimensions));
  if (dimensions.size() != 1) return errors::InvalidArgument("the op takes one table");
  c->set_output(output, c->Matrix(n, dimensions[0]));
  return absl::OkStatus();
}

absl::Status OnePerKey(::tensorflow::shape_inference::InferenceContext* c) {
  std::vector<::tensorflow::shape_inference::ShapeHandle> keys;
  TF_RETURN_IF_ERROR(c->input("keys", &keys));
  TF_RETURN_IF_ERROR(c->WithRank(keys[0], 1, &keys[0]));
  c->set_output(0, keys[0]);
  return absl::OkStatus();
}

absl::Status ReadInteger(OpKernelContext* ctx, const char* input, int64_t* number) {
  const Tensor* given = nullptr;
  TF_RETURN_IF_ERROR(ctx->input(input, &given));
  if (given->NumElements() != 1) {
    return errors::InvalidArgument(input, " must be one number, not of shape ", given->shape().DebugString());
  }
  *number = given->flat<int64_t>()(0);
  return absl::OkStatus();
}

absl::Status ReadSlots(OpKernelContext* ctx, int64_t there, int64_t* first, int64_t* n) {
  TF_RETURN_IF_ERROR(ReadInteger(ctx, "first_slot", first));
  TF_RETURN_IF_ERROR(ReadInteger(ctx, "num_slots", n));
  *first = std::clamp<int64_t>(*first, 0, there);
  *n = std::clamp<int64_t>(*n, 0, there - *first);
  return absl::OkStatus();
}

absl::Status HeldSlots(OpKernelContext* ctx, const sok_context* core, const sok_hash_index* index, int64_t first,
                       int64_t n, Tensor* keys, Tensor* slots) {
  Tensor count, on_host;
  TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_INT64, {n}, keys));
  TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_INT64, {n}, slots));
  TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_INT64, {1}, &count));
  TF_RETURN_IF_ERROR(SOK_TF_STATUS(sok_hash_index_export(core, index, first, View(*keys), View(*slots), View(count))));
  TF_RETURN_IF_ERROR(AllocateHost(ctx, ::tensorflow::DT_INT64, {1}, &on_host));
  TF_RETURN_IF_ERROR(CopyToHost(ctx, count.data(), &on_host));
  const int64_t held = on_host.flat<int64_t>()(0);
  *keys = keys->Slice(0, held);
  *slots = slots->Slice(0, held);
  return absl::OkStatus();
}

}  // namespace sok::tf
