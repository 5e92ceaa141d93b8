// SPDX-License-Identifier: Apache-2.0
// locate, insert: keys -> slots on the rank that owns them; where tables have an index, new keys get theirs.
#include <string>
#include <vector>

#include "device_errors.h"
#include "gpu.h"
#include "lookups.h"
#include "messages.h"
#include "tables.h"
#include "tensorflow/core/framework/op.h"

// Which keys that tables lack get rows.
#define SOK_ADMISSION_ATTRIBUTES Attr("admit: bool = false").Attr("filter: bool = false")
#define SOK_ADMISSION_ATTRIBUTES_DOC                                                   \
  "admit: whether new keys get rows by the admission of their table alone, or each.\n" \
  "filter: whether its filter_ratio counts.\n"

namespace sok::tf {

REGISTER_OP("SokLocate")
    .Input("keys: int64")
    .Input("counts: int64")
    .Input("indexed_tables: num_indexed * resource")
    .Output("slots: int64")
    .Output("bag_splits: int64")
    .Output("failed: int64")
    .Output("message: string")
    .SOK_GENERATIONS_OUTPUT.SOK_TABLE_ATTRIBUTES.Attr("lookup_tables: list(int) >= 1")
    .Attr("num_indexed: int >= 0")
    .SOK_ADMISSION_ATTRIBUTES
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      std::vector<::tensorflow::shape_inference::ShapeHandle> keys;
      TF_RETURN_IF_ERROR(c->input("keys", &keys));
      TF_RETURN_IF_ERROR(c->WithRank(keys[0], 1, &keys[0]));
      int64_t num_indexed = 0, num_ranks = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("num_indexed", &num_indexed));
      TF_RETURN_IF_ERROR(c->GetAttr("num_ranks", &num_ranks));
      for (int i = 0; i < 2; ++i) c->set_output(i, c->Vector(c->UnknownDim()));
      c->set_output(2, c->Matrix(num_ranks, 1));
      c->set_output(3, c->Scalar());
      c->set_output(4, c->Vector(num_indexed));
      return absl::OkStatus();
    })
    .Doc(
        "Finds the slots of the keys that other ranks ask this one for.\n\n"
        "keys: the messages of keys as they came: for each rank those whose rows it wants, by table; those of bags, "
        "by\nlookup; row splits of the bags, by lookup.\n"
        "counts: what SokExchangeSizes had as `received`.\n"
        "indexed_tables: the variables of those tables that have an index, in their order; the keys that they lack are "
        "inserted.\n  Where there are none of them, nothing is inserted, and in `slots` are the keys themselves.\n"
        "slots: the slot of each key is where the key is in `keys`.\n"
        "bag_splits: `keys` where row splits are among them, else [0].\n"
        "failed: [num_ranks, 1] 0, or for each rank the code of the error because of which nothing was inserted: the\n"
        "  op does not fail then, so that all ranks may.\n"
        "message: of this error.\n" SOK_GENERATIONS_OUTPUT_DOC
        "lookup_tables: position of each lookup's table.\n" SOK_ADMISSION_ATTRIBUTES_DOC SOK_TABLE_ATTRIBUTES_DOC);

namespace {

// Locks the variables of tables that have an index, so that it may insert. indices: those of all tables, nullptr of a
// table that has none.
absl::Status LockIndices(OpKernelContext* ctx, const TableAttributes& tables, VariableLocks* locks,
                         std::vector<const sok_index*>* indices) {
  TF_RETURN_IF_ERROR(locks->Lock(ctx, {"indexed_tables"}, VariableLocks::kExclusive));
  indices->assign(tables.num_tables(), nullptr);
  for (int i = 0; i < tables.num_tables(); ++i) {
    if (!tables.is_indexed(i)) continue;
    IndexedTable* table = nullptr;
    TF_RETURN_IF_ERROR(FindIndexed(tables.tables()[i], *locks->tensor(tables.place(i)), &table));
    (*indices)[i] = table->index();
  }
  return absl::OkStatus();
}

absl::Status Insert(OpKernelContext* ctx, const CoreContext& core, const TableAttributes& tables,
                    const std::vector<const sok_index*>& indices, const std::vector<sok_lookup>& lookups,
                    uint32_t flags) {
  return OfMemory(ctx, SOK_TF_STATUS(sok_locate(core.get(), tables.num_tables(), tables.tables().data(), indices.data(),
                                                static_cast<int32_t>(lookups.size()), lookups.data(), flags)));
}

uint32_t Flags(OpKernelConstruction* ctx) {
  return SOK_LOCATE_INSERT | (Attribute<bool>(ctx, "admit") ? SOK_LOCATE_ADMIT : SOK_LOCATE_BESIDE) |
         (Attribute<bool>(ctx, "filter") ? SOK_LOCATE_FILTER : 0);
}

// After an insertion: the variables show the slots that there are now, and the op gives their generations.
absl::Status ShowInserted(OpKernelContext* ctx, VariableLocks* locks) {
  ::tensorflow::AllocatorAttributes host;
  host.set_on_host(true);
  Tensor* generations = nullptr;
  TF_RETURN_IF_ERROR(ctx->allocate_output("generations", {locks->size()}, &generations, host));
  for (int i = 0; i < locks->size(); ++i) {
    ShowGrown(locks->variable(i));
    generations->flat<int64_t>()(i) = ColumnBuffer::Of(*locks->tensor(i))->table()->generation();
  }
  return absl::OkStatus();
}

}  // namespace

class LocateOp : public ::tensorflow::OpKernel {
 public:
  explicit LocateOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), tables_(ctx), lookup_tables_(LookupTables(ctx, tables_.num_tables())), flags_(Flags(ctx)) {
    const int given = Attribute<int>(ctx, "num_indexed");
    OP_REQUIRES(ctx, given == 0 || given == tables_.num_indexed(),
                errors::InvalidArgument(given, " variables of ", tables_.num_indexed(), " tables with an index"));
    inserts_ = given > 0;
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor *keys, *counts;
    OP_REQUIRES_OK(ctx, ctx->input("keys", &keys));
    OP_REQUIRES_OK(ctx, ctx->input("counts", &counts));
    Messages messages;
    OP_REQUIRES_OK(ctx, messages.Read(*counts, tables_.dimensions(), lookup_tables_));
    OP_REQUIRES(ctx, keys->dims() == 1 && keys->NumElements() == messages->num_keys,
                errors::InvalidArgument("messages of ", messages->num_keys, " keys and row splits cannot be ",
                                        keys->shape().DebugString()));
    Tensor* slots = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {messages->num_keys}, &slots));
    ctx->set_output(1, messages->num_bag_splits > 0 ? *keys : keys->Slice(0, 0));
    std::vector<sok_lookup> lookups;
    OP_REQUIRES_OK(ctx, messages.Lookups(View(*keys), View(*slots), Absent(), &lookups));
    CoreContext core(ctx);
    VariableLocks locks;
    std::vector<const sok_index*> indices;
    if (inserts_) {
      OP_REQUIRES_OK(ctx, LockIndices(ctx, tables_, &locks, &indices));
    } else {
      for (int i = 0; i < tables_.num_tables(); ++i) indices.push_back(tables_.is_indexed(i) ? &kNoIndex : nullptr);
    }
    const absl::Status status = Insert(ctx, core, tables_, indices, lookups, flags_);
    if (!inserts_) OP_REQUIRES_OK(ctx, status);
    Tensor *failed, *message;
    OP_REQUIRES_OK(ctx, ctx->allocate_output("failed", {tables_.num_ranks(), 1}, &failed));
    OP_REQUIRES_OK(ctx, ctx->allocate_output("message", {}, &message));
    failed->matrix<int64_t>().setConstant(status.raw_code());
    message->scalar<::tensorflow::tstring>()() = std::string(status.message());
    OP_REQUIRES_OK(ctx, ShowInserted(ctx, &locks));
    if (inserts_ || tables_.num_indexed() == 0) return;
    for (const sok_lookup& lookup : lookups) {
      if (!tables_.is_indexed(lookup.table) || lookup.keys.shape[0] == 0) continue;
      const int64_t first = static_cast<const int64_t*>(lookup.keys.data) - keys->flat<int64_t>().data();
      const int64_t end = first + lookup.keys.shape[0];
      Tensor stay = slots->Slice(first, end);
      OP_REQUIRES_OK(ctx, CopyOnDevice(ctx, keys->Slice(first, end), &stay));
    }
  }

 private:
  TableAttributes tables_;
  std::vector<int64_t> lookup_tables_;
  uint32_t flags_;
  bool inserts_ = false;
};

SOK_REGISTER_KERNELS("SokLocate", LocateOp, .HostMemory("counts").HostMemory("failed").HostMemory("generations"));

REGISTER_OP("SokInsert")
    .Input("indexed_tables: num_indexed * resource")
    .SOK_LOOKUP_INPUTS.Output("slots: num_lookups * int64")
    .SOK_GENERATIONS_OUTPUT.SOK_TABLE_ATTRIBUTES.SOK_LOOKUP_ATTRIBUTES.Attr("num_indexed: int >= 0")
    .Attr("concat: bool")
    .SOK_ADMISSION_ATTRIBUTES.SetIsStateful()
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      std::vector<::tensorflow::shape_inference::ShapeHandle> keys;
      TF_RETURN_IF_ERROR(c->input("keys", &keys));
      for (auto& each : keys) TF_RETURN_IF_ERROR(c->WithRank(each, 1, &each));
      int64_t num_indexed = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("num_indexed", &num_indexed));
      TF_RETURN_IF_ERROR(c->set_output("generations", {c->Vector(num_indexed)}));
      return c->set_output("slots", keys);
    })
    .Doc(
        "Finds the slots of keys where one process holds all tables, some of which have an index or are stacks; keys\n"
        "that those with an index lack are inserted. What is wrong with a lookup is found before.\n\n"
        "indexed_tables: the variables of the tables with an index, in their order.\n" SOK_LOOKUP_INPUTS_DOC
        "slots: [n] for each lookup; they take the place of the keys in what follows.\n" SOK_GENERATIONS_OUTPUT_DOC
            SOK_TABLE_ATTRIBUTES_DOC SOK_LOOKUP_ATTRIBUTES_DOC
        "concat: whether all lookups must have as many bags.\n" SOK_ADMISSION_ATTRIBUTES_DOC);

class InsertOp : public ::tensorflow::OpKernel {
 public:
  explicit InsertOp(OpKernelConstruction* ctx)
      : OpKernel(ctx),
        tables_(ctx),
        lookups_(ctx, tables_.num_tables()),
        concat_(Attribute<bool>(ctx, "concat")),
        flags_(Flags(ctx)) {
    OP_REQUIRES(ctx, Attribute<int>(ctx, "num_indexed") == tables_.num_indexed(),
                errors::InvalidArgument("there are ", tables_.num_indexed(), " tables with an index"));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckDevice(ctx));
    std::vector<sok_lookup> lookups;
    OP_REQUIRES_OK(ctx, lookups_.Read(ctx, tables_.tables(), &lookups));
    if (concat_) OP_REQUIRES_OK(ctx, CheckBagsAreAsMany(tables_.tables(), lookups));
    ::tensorflow::OpOutputList slots;
    OP_REQUIRES_OK(ctx, ctx->output_list("slots", &slots));
    for (int i = 0; i < lookups_.num_lookups(); ++i) {
      Tensor* of_keys = nullptr;
      OP_REQUIRES_OK(ctx, slots.allocate(i, {lookups[i].keys.shape[0]}, &of_keys));
      lookups[i].slots = View(*of_keys);
    }
    VariableLocks locks;
    std::vector<const sok_index*> indices;
    OP_REQUIRES_OK(ctx, LockIndices(ctx, tables_, &locks, &indices));
    CoreContext core(ctx);
    OP_REQUIRES_OK(ctx, Insert(ctx, core, tables_, indices, lookups, flags_));
    OP_REQUIRES_OK(ctx, ShowInserted(ctx, &locks));
  }

 private:
  TableAttributes tables_;
  LookupAttributes lookups_;
  bool concat_;
  uint32_t flags_;
};

SOK_REGISTER_KERNELS("SokInsert", InsertOp, .HostMemory("generations"));

}  // namespace sok::tf
