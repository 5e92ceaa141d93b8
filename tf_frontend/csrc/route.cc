// SPDX-License-Identifier: Apache-2.0
// route: unique keys of a batch, bucketed by the rank that owns them.
#include <algorithm>

#include "gpu.h"
#include "lookups.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

using ::tensorflow::shape_inference::InferenceContext;

REGISTER_OP("SokRoute")
    .SOK_LOOKUP_INPUTS.Input("batch_message: string")
    .Output("unique_keys: int64")
    .Output("counts: int64")
    .Output("inverse: int64")
    .Output("order: int32")
    .Output("unique_splits: int32")
    .Output("message: string")
    .SOK_TABLE_ATTRIBUTES.SOK_LOOKUP_ATTRIBUTES
    .SetShapeFn([](InferenceContext* c) {
      int64_t num_ranks = 0, num_tables = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("num_ranks", &num_ranks));
      TF_RETURN_IF_ERROR(c->GetAttr("num_tables", &num_tables));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Matrix(num_ranks, num_tables + 1));
      c->set_output(2, c->Vector(c->UnknownDim()));
      c->set_output(3, c->Vector(c->UnknownDim()));
      c->set_output(4, c->Vector(c->UnknownDim()));
      c->set_output(5, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(
        "Removes duplicate keys and buckets the rest by owning rank. A batch that cannot be looked up does not fail "
        "here,\n"
        "where the other ranks would wait for this one, but in SokExchangeSizes, on all ranks at "
        "once.\n\n" SOK_LOOKUP_INPUTS_DOC
        "batch_message: what SokBags gave as `message`, or empty; when it is not, this rank fails with it.\n"
        "unique_keys: [u] in send order: by owning rank, then table, then key. On a GPU, where u is not known yet, "
        "[n], of\nwhich the first u are valid.\n"
        "counts: [num_ranks, num_tables + 1] unique keys for each rank and table; the last column is 1 when this rank "
        "failed.\n"
        "inverse: [n] for each entry, the offset of its row in the flat buffer of exchanged rows.\n"
        "order: [n] entries grouped by unique key.\n"
        "unique_splits: [n + 1] where each unique key's entries begin in `order`; the first u + 1 are valid.\n"
        "message: why this rank failed, or empty. What a GPU finds wrong is not in it: SokExchangeSizes reads its "
        "error\nrecord.\n" SOK_TABLE_ATTRIBUTES_DOC SOK_LOOKUP_ATTRIBUTES_DOC);

// What an op writes. `counts` is [num_ranks, num_tables + 1].
struct RouteOutputs {
  Tensor keys, splits;  // of n and n + 1 elements; set as outputs when their sizes are known
  Tensor *counts, *inverse, *order, *message;

  absl::Status Allocate(OpKernelContext* ctx, int64_t n, int num_ranks, int num_tables) {
    TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_INT64, {n}, &keys));
    TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_INT32, {n + 1}, &splits));
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, {num_ranks, num_tables + 1}, &counts));
    TF_RETURN_IF_ERROR(ctx->allocate_output(2, {n}, &inverse));
    TF_RETURN_IF_ERROR(ctx->allocate_output(3, {n}, &order));
    return ctx->allocate_output(5, {}, &message);
  }

  sok_routing Routing(const sok_tensor& count_view) const {
    sok_routing routing = SOK_ROUTING_INIT;
    routing.keys = View(keys);
    routing.counts = count_view;
    routing.inverse = View(*inverse);
    routing.order = View(*order);
    routing.unique_splits = View(splits);
    return routing;
  }
};

class RouteOp : public ::tensorflow::OpKernel {
 public:
  explicit RouteOp(OpKernelConstruction* ctx) : OpKernel(ctx), tables_(ctx), lookups_(ctx, tables_.num_tables()) {}

  void Compute(OpKernelContext* ctx) override {
    const std::vector<sok_table> tables = tables_.tables();
    std::vector<sok_lookup> lookups;
    const Tensor* batch_message = nullptr;
    OP_REQUIRES_OK(ctx, ctx->input("batch_message", &batch_message));
    const std::string_view known = batch_message->scalar<::tensorflow::tstring>()();
    absl::Status status = known.empty() ? lookups_.Read(ctx, tables, &lookups) : absl::InvalidArgumentError(known);
    const int64_t n = status.ok() ? LookupAttributes::NumEntries(lookups) : 0;
    RouteOutputs outputs;
    OP_REQUIRES_OK(ctx, outputs.Allocate(ctx, n, tables_.num_ranks(), tables_.num_tables()));
    int64_t unique = n;
    OP_REQUIRES_OK(ctx, OnGpu(ctx) ? OnDevice(ctx, tables, lookups, &outputs, &status)
                                   : OnHost(ctx, tables, lookups, &outputs, &status, &unique));
    outputs.message->scalar<::tensorflow::tstring>()() = std::string(status.message());
    ctx->set_output(0, outputs.keys.Slice(0, unique));
    ctx->set_output(4, outputs.splits);
  }

 private:
  // `status`: whether the batch can be routed, as far as is known; the answer is part of the outputs.
  absl::Status OnHost(OpKernelContext* ctx, const std::vector<sok_table>& tables,
                      const std::vector<sok_lookup>& lookups, RouteOutputs* outputs, absl::Status* status,
                      int64_t* unique) const {
    const int num_ranks = tables_.num_ranks();
    const int num_tables = tables_.num_tables();
    std::vector<int64_t> by_rank(static_cast<size_t>(num_ranks) * num_tables, 0);
    if (status->ok()) {
      const sok_routing routing = outputs->Routing({by_rank.data(), SOK_INT64, 2, {num_ranks, num_tables}});
      CoreContext core(ctx);
      *status =
          ToStatus(sok_route(core.get(), num_tables, tables.data(), lookups_.num_lookups(), lookups.data(), &routing));
      if (!status->ok()) std::fill(by_rank.begin(), by_rank.end(), 0);
    }
    *unique = 0;
    auto matrix = outputs->counts->matrix<int64_t>();
    for (int rank = 0; rank < num_ranks; ++rank) {
      for (int table = 0; table < num_tables; ++table) {
        const int64_t count = by_rank[static_cast<size_t>(rank) * num_tables + table];
        matrix(rank, table) = count;
        *unique += count;
      }
      matrix(rank, num_tables) = status->ok() ? 0 : 1;
    }
    return absl::OkStatus();
  }

  // Nothing waits: the counts stay on the device, and so does the news whether the keys were right, which its error
  // record gives to the last column.
  absl::Status OnDevice(OpKernelContext* ctx, std::vector<sok_table> tables, const std::vector<sok_lookup>& lookups,
                        RouteOutputs* outputs, absl::Status* status) const {
    const int num_ranks = tables_.num_ranks();
    const int num_tables = tables_.num_tables();
    if (status->ok()) {
      // A table of one row that nobody looks up: the core makes room for the last column.
      sok_table column = tables.front();
      column.name = "failure";
      column.owner = -1;
      column.num_rows = column.dimension = 1;
      tables.push_back(column);
      const sok_routing routing = outputs->Routing(View(*outputs->counts));
      CoreContext core(ctx);
      int code = sok_route(core.get(), num_tables + 1, tables.data(), lookups_.num_lookups(), lookups.data(), &routing);
      for (int rank = 0; rank < num_ranks && code == SOK_OK; ++rank) {
        int64_t* flag = static_cast<int64_t*>(outputs->counts->data()) + int64_t{rank} * (num_tables + 1) + num_tables;
        code = sok_error_record_flag(core.get(), {flag, SOK_INT64, 1, {1, 1}});
      }
      *status = ToStatus(code);
    }
    if (status->ok()) return absl::OkStatus();
    Tensor failed;
    TF_RETURN_IF_ERROR(AllocateHost(ctx, ::tensorflow::DT_INT64, outputs->counts->shape(), &failed));
    auto matrix = failed.matrix<int64_t>();
    matrix.setZero();
    for (int rank = 0; rank < num_ranks; ++rank) matrix(rank, num_tables) = 1;
    return CopyToGpu(ctx, failed, outputs->counts);
  }

  TableAttributes tables_;
  LookupAttributes lookups_;
};

SOK_REGISTER_KERNELS("SokRoute", RouteOp);

}  // namespace sok::tf
