// SPDX-License-Identifier: Apache-2.0
// route: what a batch asks of the ranks that own its rows: unique keys of lookups that are pooled here, keys and row
// splits of those that are pooled at the owner.
#include "gpu.h"
#include "lookups.h"
#include "messages.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

using ::tensorflow::DT_INT64;
using ::tensorflow::shape_inference::InferenceContext;

REGISTER_OP("SokRoute")
    .SOK_LOOKUP_INPUTS.Input("batch_messages: num_messages * string")
    .Input("table: resource")
    .Output("unique_keys: int64")
    .Output("counts: int64")
    .Output("inverse: int64")
    .Output("order: int32")
    .Output("unique_splits: int32")
    .Output("bag_keys: int64")
    .Output("bag_splits: int64")
    .Output("message: string")
    .SOK_TABLE_ATTRIBUTES.SOK_LOOKUP_ATTRIBUTES.Attr("num_messages: int >= 0")
    .Attr("concat: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      int64_t num_ranks = 0, num_tables = 0, num_lookups = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("num_ranks", &num_ranks));
      TF_RETURN_IF_ERROR(c->GetAttr("num_tables", &num_tables));
      TF_RETURN_IF_ERROR(c->GetAttr("num_lookups", &num_lookups));
      for (int i = 0; i < 7; ++i) c->set_output(i, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Matrix(num_ranks, Messages::NumColumns(num_tables, num_lookups)));
      c->set_output(7, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(
        "Decides for each lookup whether it is pooled here or at the owner (sok_split_batch). Of those that are "
        "pooled here it\n"
        "removes duplicate keys and buckets the rest by owning rank; the bags of the others it cuts into parts by "
        "owning rank.\n"
        "A batch that cannot be looked up does not fail here, where the other ranks would wait for this one, but in\n"
        "SokExchangeSizes, on all ranks at once.\n\n" SOK_LOOKUP_INPUTS_DOC
        "batch_messages: what SokBags gave as `message`, where it was asked; when it is not empty, this rank fails "
        "with it.\n"
        "table: any of the tables; nothing of it is read. TensorFlow computes what follows from constants alone before "
        "the\n"
        "function runs, each output by itself and in the CPU's order, and a message on a GPU cannot be one.\n"
        "unique_keys: [n] in send order: by owning rank, then table, then key; as many are valid as `counts` says.\n"
        "counts: [num_ranks, num_tables + 2 num_lookups + 1] what is asked of each rank: unique keys of each table, "
        "keys of\n"
        "each lookup that is pooled there, their row splits; the last column is 1 when this rank failed.\n"
        "inverse: [n] for each entry of lookups that are pooled here, the offset of its row in what SokCombine reads.\n"
        "order: [n] these entries grouped by unique key.\n"
        "unique_splits: [n + 1] where each unique key's entries begin in `order`; the first u + 1 are valid.\n"
        "bag_keys: [m] the keys of lookups that are pooled at the owner, by owning rank, then by lookup.\n"
        "bag_splits: row splits of these, likewise.\n"
        "message: why this rank failed, or empty. What a GPU finds wrong is not in it: SokExchangeSizes reads its "
        "error\nrecord.\n" SOK_TABLE_ATTRIBUTES_DOC SOK_LOOKUP_ATTRIBUTES_DOC
        "concat: whether all lookups must have as many bags, since their vectors are to be one array.\n");

class RouteOp : public ::tensorflow::OpKernel {
 public:
  explicit RouteOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), tables_(ctx), lookups_(ctx, tables_.num_tables()), concat_(Attribute<bool>(ctx, "concat")) {}

  void Compute(OpKernelContext* ctx) override {
    std::vector<sok_lookup> lookups;
    std::vector<int32_t> pooled(lookups_.num_lookups());
    sok_batch batch = {sizeof(sok_batch), pooled.data(), 0, 0, 0};
    absl::Status status = ReadBatch(ctx, &lookups, &batch);
    const int64_t n = batch.num_entries, columns = Messages::NumColumns(tables_.num_tables(), lookups_.num_lookups());
    Tensor *keys, *counts, *inverse, *order, *unique_splits, *bag_keys, *bag_splits, *message;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {n}, &keys));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, {tables_.num_ranks(), columns}, &counts));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, {n}, &inverse));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(3, {n}, &order));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(4, {n + 1}, &unique_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(5, {batch.num_bag_keys}, &bag_keys));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(6, {batch.num_bag_splits}, &bag_splits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(7, {}, &message));
    if (status.ok()) {
      const sok_routing routing = {sizeof(sok_routing), View(*keys),          View(*counts),   View(*inverse),
                                   View(*order),        View(*unique_splits), View(*bag_keys), View(*bag_splits)};
      CoreContext core(ctx);
      status = SOK_TF_STATUS(sok_route(core.get(), tables_.num_tables(), tables_.tables().data(),
                                       lookups_.num_lookups(), lookups.data(), pooled.data(), &routing));
      // Nothing waits: the news whether a GPU found the keys right is given to the last column by its error record.
      int64_t* const flags = static_cast<int64_t*>(counts->data()) + columns - 1;
      const sok_tensor last_column = {flags, SOK_INT64, 2, {tables_.num_ranks(), 1}, columns};
      if (status.ok() && OnGpu(ctx)) status = ToStatus(sok_error_record_flag(core.get(), last_column));
    }
    message->scalar<::tensorflow::tstring>()() = std::string(status.message());
    if (!status.ok()) OP_REQUIRES_OK(ctx, TellOfFailure(ctx, counts));
  }

 private:
  absl::Status ReadBatch(OpKernelContext* ctx, std::vector<sok_lookup>* lookups, sok_batch* batch) const {
    ::tensorflow::OpInputList messages;
    TF_RETURN_IF_ERROR(ctx->input_list("batch_messages", &messages));
    for (const Tensor& message : messages) {
      const std::string_view known = message.scalar<::tensorflow::tstring>()();
      if (!known.empty()) return absl::InvalidArgumentError(known);
    }
    TF_RETURN_IF_ERROR(lookups_.Read(ctx, tables_.tables(), lookups));
    if (concat_) TF_RETURN_IF_ERROR(CheckBagsAreAsMany(tables_.tables(), *lookups));
    CoreContext core(ctx);
    return ToStatus(sok_split_batch(core.get(), tables_.num_tables(), tables_.tables().data(), lookups_.num_lookups(),
                                    lookups->data(), batch));
  }

  // The last column says so; the others mean nothing then.
  static absl::Status TellOfFailure(OpKernelContext* ctx, Tensor* counts) {
    Tensor failed = *counts;
    if (OnGpu(ctx)) TF_RETURN_IF_ERROR(AllocateHost(ctx, DT_INT64, counts->shape(), &failed));
    failed.matrix<int64_t>().setConstant(1);
    return OnGpu(ctx) ? CopyFromHost(ctx, failed, counts) : absl::OkStatus();
  }

  TableAttributes tables_;
  LookupAttributes lookups_;
  bool concat_;
};

SOK_REGISTER_KERNELS("SokRoute", RouteOp);

}  // namespace sok::tf
