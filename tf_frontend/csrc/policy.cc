// SPDX-License-Identifier: Apache-2.0
// erase, clear, read_and_evict, scores, epochs, the end of a step, prefetch: what goes from a dynamic table, and when,
// and what comes to the memory of its device.
#include <algorithm>
#include <vector>

#include "device_errors.h"
#include "gpu.h"
#include "one_table.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

using ::tensorflow::shape_inference::InferenceContext;

REGISTER_OP("SokErase")
    .Input("tables: num_tables * resource")
    .Input("keys: key_type")
    .Output("slots: int64")
    .SOK_TABLE_ATTRIBUTES.Attr("key_type: {int32, int64}")
    .SetShapeFn(OnePerKey)
    .Doc(
        "Erases keys of a dynamic table; gradients of their rows are refused from now on.\n\n"
        "tables: the table.\n"
        "keys: [n].\n"
        "slots: [n] those that they had; -1 where the table held none, or it came before.\n" SOK_TABLE_ATTRIBUTES_DOC);

class EraseOp : public OneTableOp {
 public:
  explicit EraseOp(OpKernelConstruction* ctx) : OneTableOp(ctx, VariableLocks::kExclusive) {}

 private:
  absl::Status Run(OpKernelContext* ctx, const sok_context* core, sok_dynamic_table* table) override {
    const Tensor* keys = nullptr;
    TF_RETURN_IF_ERROR(ctx->input("keys", &keys));
    Tensor* slots = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, keys->shape(), &slots));
    return SOK_TF_STATUS(sok_dynamic_table_erase(core, table, View(*keys), View(*slots)));
  }
};

SOK_REGISTER_KERNELS("SokErase", EraseOp);

REGISTER_OP("SokPrefetch")
    .Input("tables: num_tables * resource")
    .Input("keys: key_type")
    .SOK_TABLE_ATTRIBUTES.Attr("key_type: {int32, int64}")
    .SetShapeFn(NoOutputs)
    .Doc(
        "Brings rows of a dynamic table from the host's memory to that of the GPU that it is on. Does not wait.\n\n"
        "tables: the table.\n"
        "keys: [n], any.\n" SOK_TABLE_ATTRIBUTES_DOC);

class PrefetchOp : public OneTableOp {
 public:
  explicit PrefetchOp(OpKernelConstruction* ctx) : OneTableOp(ctx, VariableLocks::kExclusive) {}

 private:
  absl::Status Run(OpKernelContext* ctx, const sok_context* core, sok_dynamic_table* table) override {
    const Tensor* keys = nullptr;
    TF_RETURN_IF_ERROR(ctx->input("keys", &keys));
    const sok_tensor view = View(*keys);
    return SOK_TF_STATUS(sok_dynamic_table_prefetch(core, 1, &table, &view));
  }
};

SOK_REGISTER_KERNELS("SokPrefetch", PrefetchOp);

REGISTER_OP("SokClear")
    .Input("tables: num_tables * resource")
    .SOK_TABLE_ATTRIBUTES.SetShapeFn(NoOutputs)
    .Doc("Erases all keys of a dynamic table.\n\ntables: the table.\n" SOK_TABLE_ATTRIBUTES_DOC);

class ClearOp : public OneTableOp {
 public:
  explicit ClearOp(OpKernelConstruction* ctx) : OneTableOp(ctx, VariableLocks::kExclusive) {}

 private:
  absl::Status Run(OpKernelContext*, const sok_context* core, sok_dynamic_table* table) override {
    return SOK_TF_STATUS(sok_dynamic_table_clear(core, table));
  }
};

SOK_REGISTER_KERNELS("SokClear", ClearOp);

REGISTER_OP("SokReadAndEvict")
    .Input("tables: num_tables * resource")
    .Input("keys: key_type")
    .Output("rows: dtype")
    .Output("evicted_keys: int64")
    .Output("evicted_rows: dtype")
    .SOK_TABLE_ATTRIBUTES.Attr("key_type: {int32, int64}")
    .Attr("dtype: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(OnePerKey(c));
      TF_RETURN_IF_ERROR(RowsOfTable(c, 0, c->Dim(c->output(0), 0)));
      const auto evicted = c->UnknownDim();
      c->set_output(1, c->Vector(evicted));
      return RowsOfTable(c, 2, evicted);
    })
    .Doc(
        "Rows of keys that a dynamic table holds afterwards, and the rows that it gave up for them.\n\n"
        "tables: the table.\n"
        "keys: [n].\n"
        "rows: [n, dimension].\n"
        "evicted_keys: [m].\n"
        "evicted_rows: [m, dimension], as they were.\n" SOK_TABLE_ATTRIBUTES_DOC);

class ReadAndEvictOp : public OneTableOp {
 public:
  explicit ReadAndEvictOp(OpKernelConstruction* ctx)
      : OneTableOp(ctx, VariableLocks::kExclusive), dtype_(Attribute<::tensorflow::DataType>(ctx, "dtype")) {}

 private:
  absl::Status Run(OpKernelContext* ctx, const sok_context* core, sok_dynamic_table* table) override {
    const Tensor* keys = nullptr;
    TF_RETURN_IF_ERROR(ctx->input("keys", &keys));
    TF_RETURN_IF_ERROR(CheckMine(ctx, core, *keys));
    const int64_t n = keys->NumElements();
    const ::tensorflow::TensorShape shape({n, sok_dynamic_table_column(table, 0).shape[1]});
    Tensor* rows = nullptr;
    Tensor evicted_keys, evicted_rows;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, shape, &rows));
    // To be told what went, the call waits for a GPU. A table without scores gives up nothing.
    const bool evicts = sok_dynamic_table_scores(table).rank != 0;
    const int64_t most = evicts ? n : 0;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_INT64, {most}, &evicted_keys));
    TF_RETURN_IF_ERROR(ctx->allocate_temp(dtype_, {most, shape.dim_size(1)}, &evicted_rows));
    int64_t num_evicted = 0;
    const sok_tensor none = SOK_NO_TENSOR;
    TF_RETURN_IF_ERROR(SOK_TF_STATUS(
        sok_dynamic_table_read_and_evict(core, table, View(*keys), View(*rows), evicts ? View(evicted_keys) : none,
                                         evicts ? View(evicted_rows) : none, evicts ? &num_evicted : nullptr)));
    TF_RETURN_IF_ERROR(CheckDevice(ctx));
    ctx->set_output(1, evicted_keys.Slice(0, num_evicted));
    ctx->set_output(2, evicted_rows.Slice(0, num_evicted));
    return absl::OkStatus();
  }

  // That the keys are this rank's; on a GPU it is found later, and nothing is inserted then.
  absl::Status CheckMine(OpKernelContext* ctx, const sok_context* core, const Tensor& keys) const {
    Tensor slots;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_INT64, keys.shape(), &slots));
    sok_lookup lookup = SOK_LOOKUP_INIT;
    lookup.keys = View(keys);
    lookup.slots = View(slots);
    const sok_index* const index = &kNoIndex;
    return SOK_TF_STATUS(sok_locate(core, 1, &placement(), &index, 1, &lookup, 0));
  }

  ::tensorflow::DataType dtype_;
};

SOK_REGISTER_KERNELS("SokReadAndEvict", ReadAndEvictOp);

REGISTER_OP("SokScores")
    .Input("tables: num_tables * resource")
    .Input("slots: int64")
    .Output("scores: int64")
    .SOK_TABLE_ATTRIBUTES
    .SetShapeFn([](InferenceContext* c) {
      std::vector<::tensorflow::shape_inference::ShapeHandle> slots;
      TF_RETURN_IF_ERROR(c->input("slots", &slots));
      TF_RETURN_IF_ERROR(c->WithRank(slots[0], 1, &slots[0]));
      c->set_output(0, slots[0]);
      return absl::OkStatus();
    })
    .Doc(
        "What rows of a dynamic table are evicted by (sok_dynamic_table_scores). On a GPU it waits.\n\n"
        "tables: the table, which evicts.\n"
        "slots: [n] in host memory.\n"
        "scores: [n] in host memory; -1 where the slot is.\n" SOK_TABLE_ATTRIBUTES_DOC);

class ScoresOp : public OneTableOp {
 public:
  explicit ScoresOp(OpKernelConstruction* ctx) : OneTableOp(ctx, VariableLocks::kShared) {}

 private:
  absl::Status Run(OpKernelContext* ctx, const sok_context*, sok_dynamic_table* table) override {
    const Tensor* slots = nullptr;
    TF_RETURN_IF_ERROR(ctx->input("slots", &slots));
    Tensor* scores = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, slots->shape(), &scores));
    const sok_tensor held = sok_dynamic_table_scores(table);
    if (held.rank == 0) return errors::FailedPrecondition("the table evicts nothing");
    const auto wanted = slots->flat<int64_t>();
    int64_t first = held.shape[0], end = 0;
    for (int64_t i = 0; i < wanted.size(); ++i) {
      if (wanted(i) < 0) continue;
      first = std::min(first, wanted(i));
      end = std::max(end, wanted(i) + 1);
    }
    if (end > held.shape[0]) return errors::InvalidArgument("slot ", end - 1, " of ", held.shape[0]);
    const int64_t* from = static_cast<const int64_t*>(held.data) + first;
    Tensor fetched;
    if (OnGpu(ctx) && end > first) {
      TF_RETURN_IF_ERROR(AllocateHost(ctx, ::tensorflow::DT_INT64, {end - first}, &fetched));
      TF_RETURN_IF_ERROR(CopyToHost(ctx, from, &fetched));
      from = fetched.flat<int64_t>().data();
    }
    auto found = scores->flat<int64_t>();
    for (int64_t i = 0; i < wanted.size(); ++i) found(i) = wanted(i) < 0 ? -1 : from[wanted(i) - first];
    return absl::OkStatus();
  }
};

SOK_REGISTER_KERNELS("SokScores", ScoresOp, .HostMemory("slots").HostMemory("scores"));

REGISTER_OP("SokSetScores")
    .Input("tables: num_tables * resource")
    .Input("slots: int64")
    .Input("scores: int64")
    .SOK_TABLE_ATTRIBUTES.SetShapeFn(NoOutputs)
    .Doc(
        "Gives rows of a dynamic table scores, such as SokScores gave.\n\n"
        "tables: the table.\n"
        "slots: [n].\n"
        "scores: [n].\n" SOK_TABLE_ATTRIBUTES_DOC);

class SetScoresOp : public OneTableOp {
 public:
  explicit SetScoresOp(OpKernelConstruction* ctx) : OneTableOp(ctx, VariableLocks::kExclusive) {}

 private:
  absl::Status Run(OpKernelContext* ctx, const sok_context* core, sok_dynamic_table* table) override {
    const Tensor *slots, *scores;
    TF_RETURN_IF_ERROR(ctx->input("slots", &slots));
    TF_RETURN_IF_ERROR(ctx->input("scores", &scores));
    return SOK_TF_STATUS(sok_dynamic_table_set_scores(core, table, View(*slots), View(*scores)));
  }
};

SOK_REGISTER_KERNELS("SokSetScores", SetScoresOp);

REGISTER_OP("SokSetEpoch")
    .Input("tables: num_tables * resource")
    .Input("epoch: int64")
    .SOK_TABLE_ATTRIBUTES.SetShapeFn(NoOutputs)
    .Doc(
        "The epoch of what is used from now on, for the strategies by epoch.\n\n"
        "tables: the dynamic table.\n"
        "epoch: in host memory.\n" SOK_TABLE_ATTRIBUTES_DOC);

class SetEpochOp : public OneTableOp {
 public:
  explicit SetEpochOp(OpKernelConstruction* ctx) : OneTableOp(ctx, VariableLocks::kExclusive) {}

 private:
  absl::Status Run(OpKernelContext* ctx, const sok_context*, sok_dynamic_table* table) override {
    int64_t epoch = 0;
    TF_RETURN_IF_ERROR(ReadInteger(ctx, "epoch", &epoch));
    return SOK_TF_STATUS(sok_dynamic_table_set_epoch(table, epoch));
  }
};

SOK_REGISTER_KERNELS("SokSetEpoch", SetEpochOp, .HostMemory("epoch"));

REGISTER_OP("SokGenerations")
    .Input("tables: num_tables * resource")
    .Input("seconds: double")
    .Output("generations: int64")
    .SOK_TABLE_ATTRIBUTES
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(3));
      return absl::OkStatus();
    })
    .Doc(
        "The generation of a dynamic table, the last that is known to have begun some time ago, and the last before\n"
        "the running step.\n\n"
        "tables: the table.\n"
        "seconds: how long ago, in host memory.\n"
        "generations: [3] in host memory: sok_dynamic_table_generation, sok_dynamic_table_generation_before and\n"
        "  sok_dynamic_table_running_since.\n" SOK_TABLE_ATTRIBUTES_DOC);

class GenerationsOp : public OneTableOp {
 public:
  explicit GenerationsOp(OpKernelConstruction* ctx) : OneTableOp(ctx, VariableLocks::kShared) {}

 private:
  absl::Status Run(OpKernelContext* ctx, const sok_context*, sok_dynamic_table* table) override {
    const Tensor* seconds = nullptr;
    TF_RETURN_IF_ERROR(ctx->input("seconds", &seconds));
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, {3}, &out));
    out->flat<int64_t>()(0) = sok_dynamic_table_generation(table);
    out->flat<int64_t>()(1) = sok_dynamic_table_generation_before(table, seconds->scalar<double>()());
    out->flat<int64_t>()(2) = sok_dynamic_table_running_since(table);
    return absl::OkStatus();
  }
};

SOK_REGISTER_KERNELS("SokGenerations", GenerationsOp, .HostMemory("seconds").HostMemory("generations"));

REGISTER_OP("SokEndStep")
    .Input("tables: num_tables * resource")
    .SOK_TABLE_ATTRIBUTES.SetShapeFn(NoOutputs)
    .Doc(
        "After a step that was not SokApply's: rows located until now may be evicted.\n\n"
        "tables: the dynamic table.\n" SOK_TABLE_ATTRIBUTES_DOC);

class EndStepOp : public OneTableOp {
 public:
  explicit EndStepOp(OpKernelConstruction* ctx) : OneTableOp(ctx, VariableLocks::kExclusive) {}

 private:
  absl::Status Run(OpKernelContext*, const sok_context*, sok_dynamic_table* table) override {
    return SOK_TF_STATUS(sok_dynamic_table_end_step(table));
  }
};

SOK_REGISTER_KERNELS("SokEndStep", EndStepOp);

}  // namespace sok::tf
