// SPDX-License-Identifier: Apache-2.0
// pairs, set_pairs: what a dynamic table keeps beside its rows and goes on from after a restore. shrink: memory that it
// gives back.
#include <string>

#include "device_errors.h"
#include "gpu.h"
#include "one_table.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

using ::tensorflow::shape_inference::InferenceContext;

#define SOK_PAIRS_DOC                                                                                        \
  "what: \"use_times\", generations and when they began (sok_dynamic_table_use_times), or \"candidates\",\n" \
  "  keys that wait for rows and their scores.\n"

REGISTER_OP("SokPairs")
    .Input("tables: num_tables * resource")
    .Output("pairs: int64")
    .SOK_TABLE_ATTRIBUTES.Attr("what: {'use_times', 'candidates'}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(c->UnknownDim(), 2));
      return absl::OkStatus();
    })
    .Doc(
        "What a dynamic table keeps beside its rows. On a GPU it may wait.\n\n"
        "tables: the table.\n"
        "pairs: [n, 2] in host memory.\n" SOK_PAIRS_DOC SOK_TABLE_ATTRIBUTES_DOC);

namespace {

bool IsOfUseTimes(OpKernelConstruction* ctx) { return Attribute<std::string>(ctx, "what") == "use_times"; }

// Numbers of the device where the op runs, in host memory. On a GPU it waits.
absl::Status Fetch(OpKernelContext* ctx, const void* from, int64_t n, Tensor* host) {
  TF_RETURN_IF_ERROR(AllocateHost(ctx, ::tensorflow::DT_INT64, {n}, host));
  return CopyToHost(ctx, from, host);
}

// Column `column` of pairs, where the op runs.
absl::Status Place(OpKernelContext* ctx, const Tensor& pairs, int column, Tensor* numbers) {
  const int64_t n = pairs.dim_size(0);
  Tensor host;
  TF_RETURN_IF_ERROR(AllocateHost(ctx, ::tensorflow::DT_INT64, {n}, &host));
  TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_INT64, {n}, numbers));
  const auto matrix = pairs.matrix<int64_t>();
  for (int64_t i = 0; i < n; ++i) host.flat<int64_t>()(i) = matrix(i, column);
  return CopyFromHost(ctx, host, numbers);
}

}  // namespace

class PairsOp : public OneTableOp {
 public:
  explicit PairsOp(OpKernelConstruction* ctx)
      : OneTableOp(ctx, VariableLocks::kShared), is_of_use_times_(IsOfUseTimes(ctx)) {}

 private:
  absl::Status Run(OpKernelContext* ctx, const sok_context* core, sok_dynamic_table* table) override {
    Tensor* pairs = nullptr;
    if (is_of_use_times_) {
      const int64_t count = sok_dynamic_table_use_times(table, 0, nullptr);
      TF_RETURN_IF_ERROR(ctx->allocate_output(0, {count, 2}, &pairs));
      sok_dynamic_table_use_times(table, count, reinterpret_cast<sok_use_time*>(pairs->flat<int64_t>().data()));
      return absl::OkStatus();
    }
    const sok_dynamic_table* const waiting = sok_dynamic_table_candidates(table);
    if (waiting == nullptr) return ctx->allocate_output(0, {0, 2}, &pairs);
    const sok_tensor scores = sok_dynamic_table_scores(waiting);
    Tensor keys, slots, on_host, slots_on_host, scores_on_host;
    TF_RETURN_IF_ERROR(HeldSlots(ctx, core, sok_dynamic_table_hash_index(waiting), 0, scores.shape[0], &keys, &slots));
    TF_RETURN_IF_ERROR(Fetch(ctx, keys.data(), keys.NumElements(), &on_host));
    TF_RETURN_IF_ERROR(Fetch(ctx, slots.data(), slots.NumElements(), &slots_on_host));
    TF_RETURN_IF_ERROR(Fetch(ctx, scores.data, scores.shape[0], &scores_on_host));
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, {keys.NumElements(), 2}, &pairs));
    auto out = pairs->matrix<int64_t>();
    for (int64_t i = 0; i < keys.NumElements(); ++i) {
      out(i, 0) = on_host.flat<int64_t>()(i);
      out(i, 1) = scores_on_host.flat<int64_t>()(slots_on_host.flat<int64_t>()(i));
    }
    return absl::OkStatus();
  }

  bool is_of_use_times_;
};

SOK_REGISTER_KERNELS("SokPairs", PairsOp, .HostMemory("pairs"));

REGISTER_OP("SokSetPairs")
    .Input("tables: num_tables * resource")
    .Input("pairs: int64")
    .SOK_TABLE_ATTRIBUTES.Attr("what: {'use_times', 'candidates'}")
    .SetShapeFn(NoOutputs)
    .Doc(
        "Replaces what SokPairs gives.\n\n"
        "tables: the table.\n"
        "pairs: [n, 2] in host memory.\n" SOK_PAIRS_DOC SOK_TABLE_ATTRIBUTES_DOC);

class SetPairsOp : public OneTableOp {
 public:
  explicit SetPairsOp(OpKernelConstruction* ctx)
      : OneTableOp(ctx, VariableLocks::kExclusive), is_of_use_times_(IsOfUseTimes(ctx)) {}

 private:
  absl::Status Run(OpKernelContext* ctx, const sok_context* core, sok_dynamic_table* table) override {
    const Tensor* pairs = nullptr;
    TF_RETURN_IF_ERROR(ctx->input("pairs", &pairs));
    if (pairs->dims() != 2 || pairs->dim_size(1) != 2) {
      return errors::InvalidArgument("pairs must be [n, 2], not ", pairs->shape().DebugString());
    }
    const int64_t n = pairs->dim_size(0);
    if (is_of_use_times_) {
      const int64_t* const data = pairs->flat<int64_t>().data();
      return SOK_TF_STATUS(sok_dynamic_table_set_use_times(table, n, reinterpret_cast<const sok_use_time*>(data)));
    }
    sok_dynamic_table* const waiting = sok_dynamic_table_candidates(table);
    if (waiting == nullptr) return absl::OkStatus();
    TF_RETURN_IF_ERROR(SOK_TF_STATUS(sok_dynamic_table_clear(core, waiting)));
    if (n == 0) return absl::OkStatus();
    Tensor keys, scores, slots;
    TF_RETURN_IF_ERROR(Place(ctx, *pairs, 0, &keys));
    TF_RETURN_IF_ERROR(Place(ctx, *pairs, 1, &scores));
    TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_INT64, {n}, &slots));
    const sok_index* const index = sok_dynamic_table_as_index(waiting);
    const sok_index_request request = {index, View(keys), slots.flat<int64_t>().data()};
    TF_RETURN_IF_ERROR(OfMemory(ctx, SOK_TF_STATUS(index->locate(core, 1, &request, SOK_LOCATE_INSERT))));
    return SOK_TF_STATUS(sok_dynamic_table_set_scores(core, waiting, View(slots), View(scores)));
  }

  bool is_of_use_times_;
};

SOK_REGISTER_KERNELS("SokSetPairs", SetPairsOp, .HostMemory("pairs"));

REGISTER_OP("SokShrink")
    .Input("tables: num_tables * resource")
    .Output("freed: int64")
    .SOK_TABLE_ATTRIBUTES.SetIsStateful()
    .SetShapeFn(::tensorflow::shape_inference::ScalarShape)
    .Doc(
        "Gives memory of a dynamic table back that no row uses. On a GPU it waits.\n\n"
        "tables: the table.\n"
        "freed: bytes, in host memory.\n" SOK_TABLE_ATTRIBUTES_DOC);

class ShrinkOp : public OneTableOp {
 public:
  explicit ShrinkOp(OpKernelConstruction* ctx) : OneTableOp(ctx, VariableLocks::kExclusive) {}

 private:
  absl::Status Run(OpKernelContext* ctx, const sok_context* core, sok_dynamic_table* table) override {
    Tensor* freed = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, {}, &freed));
    return SOK_TF_STATUS(sok_dynamic_table_shrink(core, table, &freed->scalar<int64_t>()()));
  }
};

SOK_REGISTER_KERNELS("SokShrink", ShrinkOp, .HostMemory("freed"));

}  // namespace sok::tf
