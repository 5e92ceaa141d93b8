// SPDX-License-Identifier: Apache-2.0
// table_counts, held, find, export: what a dynamic table holds.
#include <algorithm>

#include "device_errors.h"
#include "gpu.h"
#include "one_table.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {
REGISTER_OP("SokTableCounts")
    .Input("tables: num_tables * resource")
    .Output("counts: int64")
    .SOK_TABLE_ATTRIBUTES
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(10));
      return absl::OkStatus();
    })
    .Doc(
        "How much a dynamic table holds on this rank, and what has happened to it. On a GPU it waits.\n\n"
        "tables: the table.\n"
        "counts: [10] in host memory: the keys that it holds, what is in sok_dynamic_table_counts, and "
        "sok_dynamic_table_host_bytes.\n" SOK_TABLE_ATTRIBUTES_DOC);

class TableCountsOp : public OneTableOp {
 public:
  explicit TableCountsOp(OpKernelConstruction* ctx) : OneTableOp(ctx, VariableLocks::kShared) {}

 private:
  absl::Status Run(OpKernelContext* ctx, const sok_context* core, sok_dynamic_table* table) override {
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, {10}, &out));
    auto counts = out->flat<int64_t>();
    TF_RETURN_IF_ERROR(SOK_TF_STATUS(sok_hash_index_size(core, sok_dynamic_table_hash_index(table), &counts(0))));
    sok_dynamic_table_counts held = SOK_DYNAMIC_TABLE_COUNTS_INIT;
    TF_RETURN_IF_ERROR(SOK_TF_STATUS(sok_dynamic_table_get_counts(table, &held)));
    counts(1) = held.lookups;
    counts(2) = held.insertions;
    counts(3) = held.evictions;
    counts(4) = held.refusals;
    counts(5) = held.expirations;
    counts(6) = held.device_hits;
    counts(7) = held.host_hits;
    counts(8) = held.moves;
    counts(9) = sok_dynamic_table_host_bytes(table);
    return CheckDevice(ctx);
  }
};

SOK_REGISTER_KERNELS("SokTableCounts", TableCountsOp, .HostMemory("counts"));

REGISTER_OP("SokHeld")
    .Input("tables: num_tables * resource")
    .Input("first_slot: int64")
    .Input("num_slots: int64")
    .Output("keys: int64")
    .Output("slots: int64")
    .SOK_TABLE_ATTRIBUTES
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      const auto n = c->Vector(c->UnknownDim());
      c->set_output(0, n);
      c->set_output(1, n);
      return absl::OkStatus();
    })
    .Doc(
        "The keys that a dynamic table holds among some of its slots. On a GPU it waits.\n\n"
        "tables: the table.\n"
        "first_slot: in host memory.\n"
        "num_slots: how many from there on, in host memory.\n"
        "keys: [n] in the order of their slots.\n"
        "slots: [n] ascending.\n" SOK_TABLE_ATTRIBUTES_DOC);

class HeldOp : public OneTableOp {
 public:
  explicit HeldOp(OpKernelConstruction* ctx) : OneTableOp(ctx, VariableLocks::kShared) {}

 private:
  absl::Status Run(OpKernelContext* ctx, const sok_context* core, sok_dynamic_table* table) override {
    const sok_hash_index* const index = sok_dynamic_table_hash_index(table);
    int64_t first = 0, n = 0;
    TF_RETURN_IF_ERROR(ReadSlots(ctx, sok_hash_index_num_slots(index), &first, &n));
    Tensor keys, slots;
    TF_RETURN_IF_ERROR(HeldSlots(ctx, core, index, first, n, &keys, &slots));
    ctx->set_output(0, keys);
    ctx->set_output(1, slots);
    return CheckDevice(ctx);
  }
};

SOK_REGISTER_KERNELS("SokHeld", HeldOp, .HostMemory("first_slot").HostMemory("num_slots"));

REGISTER_OP("SokFind")
    .Input("tables: num_tables * resource")
    .Input("keys: key_type")
    .Output("slots: int64")
    .SOK_TABLE_ATTRIBUTES.Attr("key_type: {int32, int64}")
    .SetShapeFn(OnePerKey)
    .Doc(
        "The slots of keys of a dynamic table.\n\n"
        "tables: the table.\n"
        "keys: [n].\n"
        "slots: [n]; -1 where this rank does not hold the key.\n" SOK_TABLE_ATTRIBUTES_DOC);

class FindOp : public OneTableOp {
 public:
  explicit FindOp(OpKernelConstruction* ctx) : OneTableOp(ctx, VariableLocks::kShared) {}

 private:
  absl::Status Run(OpKernelContext* ctx, const sok_context* core, sok_dynamic_table* table) override {
    const Tensor* keys = nullptr;
    TF_RETURN_IF_ERROR(ctx->input("keys", &keys));
    Tensor* slots = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, keys->shape(), &slots));
    if (keys->NumElements() == 0) return absl::OkStatus();
    const sok_index* const index = sok_dynamic_table_as_index(table);
    const sok_index_request request = {index, View(*keys), slots->flat<int64_t>().data()};
    return SOK_TF_STATUS(index->locate(core, 1, &request, 0));
  }
};

SOK_REGISTER_KERNELS("SokFind", FindOp);

REGISTER_OP("SokExport")
    .Input("tables: num_tables * resource")
    .Output("keys: int64")
    .Output("rows: dtype")
    .SOK_TABLE_ATTRIBUTES.Attr("dtype: {float, half, bfloat16}")
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      const auto n = c->UnknownDim();
      c->set_output(0, c->Vector(n));
      return RowsOfTable(c, 1, n);
    })
    .Doc(
        "The keys that a dynamic table holds on this rank, and their rows. On a GPU it waits.\n\n"
        "tables: the table.\n"
        "keys: [n] in the order of their slots.\n"
        "rows: [n, dimension].\n" SOK_TABLE_ATTRIBUTES_DOC);

class ExportOp : public OneTableOp {
 public:
  explicit ExportOp(OpKernelConstruction* ctx) : OneTableOp(ctx, VariableLocks::kShared) {}

 private:
  absl::Status Run(OpKernelContext* ctx, const sok_context* core, sok_dynamic_table* table) override {
    const sok_hash_index* const index = sok_dynamic_table_hash_index(table);
    Tensor keys, slots;
    Tensor* rows = nullptr;
    TF_RETURN_IF_ERROR(HeldSlots(ctx, core, index, 0, sok_hash_index_num_slots(index), &keys, &slots));
    TF_RETURN_IF_ERROR(CheckDevice(ctx));
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, {keys.dim_size(0), sok_dynamic_table_column(table, 0).shape[1]}, &rows));
    ctx->set_output(0, keys);
    for (int64_t first = 0; first < keys.dim_size(0); first += kKeysOfCall) {
      const int64_t end = std::min(first + kKeysOfCall, keys.dim_size(0));
      TF_RETURN_IF_ERROR(SOK_TF_STATUS(
          sok_dynamic_table_read(core, table, View(keys.Slice(first, end)), View(rows->Slice(first, end)))));
    }
    return absl::OkStatus();
  }

  static constexpr int64_t kKeysOfCall = int64_t{1} << 30;  // which takes fewer than 2^31
};

SOK_REGISTER_KERNELS("SokExport", ExportOp);

}  // namespace sok::tf
