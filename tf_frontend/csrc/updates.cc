// SPDX-License-Identifier: Apache-2.0
#include "updates.h"

#include <chrono>

#include "dynamic_table.h"
#include "gpu.h"
#include "stamps.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace sok::tf {
namespace {

constexpr int kNumFields = 13;

// `fields` in the order of sok_optimizer's members.
sok_optimizer MakeOptimizer(int32_t kind, int64_t flags, const double* fields) {
  sok_optimizer optimizer = SOK_OPTIMIZER_INIT;
  optimizer.kind = kind;
  optimizer.flags = static_cast<uint32_t>(flags);
  double* const members[kNumFields] = {&optimizer.learning_rate,
                                       &optimizer.learning_rate_of_decay,
                                       &optimizer.weight_decay,
                                       &optimizer.momentum,
                                       &optimizer.beta1,
                                       &optimizer.beta2,
                                       &optimizer.rho,
                                       &optimizer.epsilon,
                                       &optimizer.l1,
                                       &optimizer.l2,
                                       &optimizer.l2_shrinkage,
                                       &optimizer.beta,
                                       &optimizer.learning_rate_power};
  for (int i = 0; i < kNumFields; ++i) *members[i] = fields[i];
  return optimizer;
}

// The clock that Python reads too: absl's own runs a little beside it.
int64_t Now() {
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since_1970).count();
}

}  // namespace

absl::Status CheckUpdateShapes(::tensorflow::shape_inference::InferenceContext* c) {
  std::vector<::tensorflow::shape_inference::ShapeHandle> handles;
  TF_RETURN_IF_ERROR(c->input("hyperparameters", &handles));
  ::tensorflow::shape_inference::ShapeHandle ignored;
  ::tensorflow::shape_inference::DimensionHandle dimension;
  TF_RETURN_IF_ERROR(c->WithRank(handles[0], 2, &ignored));
  TF_RETURN_IF_ERROR(c->WithValue(c->Dim(ignored, 1), kNumFields, &dimension));
  TF_RETURN_IF_ERROR(c->input("gradient_scale", &handles));
  return c->WithRankAtMost(handles[0], 1, &ignored);
}

UpdateKernel::UpdateKernel(OpKernelConstruction* ctx)
    : OpKernel(ctx),
      tables_(ctx),
      gradients_(ctx, tables_.dimensions()),
      num_states_(Attribute<int>(ctx, "num_states")),
      kind_(Attribute<int>(ctx, "kind")),
      flags_(Attribute<std::vector<int64_t>>(ctx, "flags")) {
  const int tables = tables_.num_tables();
  OP_REQUIRES(ctx, num_states_ % tables == 0 && num_states_ / tables <= SOK_MAX_STATES,
              errors::InvalidArgument(num_states_, " states for ", tables, " tables"));
  OP_REQUIRES(ctx, flags_.size() == static_cast<size_t>(tables),
              errors::InvalidArgument("flags need num_tables entries"));
}

absl::Status UpdateKernel::Apply(OpKernelContext* ctx, VariableLocks::Mode mode, sok_agree agree, void* opaque) const {
  const std::vector<sok_placement>& tables = tables_.tables();
  const size_t num_tables = tables.size();
  std::vector<std::vector<sok_gradient>> summands;
  TF_RETURN_IF_ERROR(gradients_.Read(ctx, &summands));
  const Tensor *fields, *scale;
  TF_RETURN_IF_ERROR(ctx->input("hyperparameters", &fields));
  TF_RETURN_IF_ERROR(ctx->input("gradient_scale", &scale));
  if (fields->dims() != 2 || fields->dim_size(1) != kNumFields ||
      (fields->dim_size(0) != 1 && fields->dim_size(0) != static_cast<int64_t>(num_tables))) {
    return errors::InvalidArgument("hyperparameters must be [1 or ", num_tables, ", ", kNumFields, "], not ",
                                   fields->shape().DebugString());
  }
  if (scale->NumElements() != 1 && scale->NumElements() != static_cast<int64_t>(num_tables)) {
    return errors::InvalidArgument("gradient_scale must be one number or ", num_tables, ", not ",
                                   scale->shape().DebugString());
  }
  const double* numbers = fields->flat<double>().data();
  const int64_t stride = fields->dim_size(0) == 1 ? 0 : kNumFields;

  VariableLocks locks;
  TF_RETURN_IF_ERROR(locks.Find(ctx, {"tables", "states"}));
  ::tensorflow::core::RefCountPtr<Stamps> of_tables;
  TF_RETURN_IF_ERROR(LookupResource(
      ctx, ctx->input(tables_.num_tables() + num_states_).scalar<::tensorflow::ResourceHandle>()(), &of_tables));
  const std::vector<int> stamps = of_tables->AddTo(&locks, num_tables);
  TF_RETURN_IF_ERROR(locks.LockFound(ctx, mode));
  std::vector<sok_columns> columns;
  TF_RETURN_IF_ERROR(ReadColumns(&locks, tables_, &columns));
  const int states = num_states_ / static_cast<int>(num_tables);
  const int64_t now = Now();
  std::vector<sok_optimizer> optimizers(num_tables);
  std::vector<sok_update> updates(num_tables);
  for (size_t i = 0; i < num_tables; ++i) {
    optimizers[i] = MakeOptimizer(kind_, flags_[i], numbers + stride * i);
    sok_update update = SOK_UPDATE_INIT;
    update.table = &columns[i];
    update.optimizer = &optimizers[i];
    update.gradient_scale = scale->flat<double>()(scale->NumElements() == 1 ? 0 : static_cast<int64_t>(i));
    update.num_states = states;
    for (int s = 0; s < states; ++s) {
      update.states[s] = VariableView(*locks.tensor(static_cast<int>(num_tables + i * states + s)));
    }
    if (stamps[i] >= 0) {
      update.stamps = VariableView(*locks.tensor(stamps[i]));
      update.stamp = now;
    }
    update.num_gradients = static_cast<int32_t>(summands[i].size());
    update.gradients = summands[i].data();
    updates[i] = update;
  }
  CoreContext core(ctx);
  return SOK_TF_STATUS(sok_apply(core.get(), static_cast<int32_t>(num_tables), updates.data(), agree, opaque));
}

}  // namespace sok::tf
