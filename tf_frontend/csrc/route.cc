// SPDX-License-Identifier: Apache-2.0
// route: what a batch asks of the ranks that own its rows: unique keys of lookups that are pooled here, keys and row
// splits of those that are pooled at the owner.
#include <algorithm>

#include "gpu.h"
#include "lookups.h"
#include "messages.h"
#include "tensorflow/core/framework/op.h"

namespace sok::tf {

using ::tensorflow::DT_FLOAT;
using ::tensorflow::DT_INT32;
using ::tensorflow::DT_INT64;
using ::tensorflow::shape_inference::InferenceContext;

REGISTER_OP("SokRoute")
    .SOK_LOOKUP_INPUTS.Input("batch_messages: num_messages * string")
    .Output("unique_keys: int64")
    .Output("counts: int64")
    .Output("inverse: int64")
    .Output("order: int32")
    .Output("unique_splits: int32")
    .Output("bag_keys: int64")
    .Output("bag_splits: int64")
    .Output("scales: float32")
    .Output("message: string")
    .SOK_TABLE_ATTRIBUTES.SOK_LOOKUP_ATTRIBUTES.Attr("num_messages: int >= 0")
    .Attr("concat: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      int64_t num_ranks = 0, num_tables = 0, num_lookups = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("num_ranks", &num_ranks));
      TF_RETURN_IF_ERROR(c->GetAttr("num_tables", &num_tables));
      TF_RETURN_IF_ERROR(c->GetAttr("num_lookups", &num_lookups));
      for (int i = 0; i < 8; ++i) c->set_output(i, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Matrix(num_ranks, Messages::NumColumns(num_tables, num_lookups) + 1));
      c->set_output(8, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(
        "Decides for each lookup whether it is pooled here or at the owner (sok_choose_pooling). Of those that are "
        "pooled here it\n"
        "removes duplicate keys and buckets the rest by owning rank; the bags of the others it cuts into parts by "
        "owning rank.\n"
        "A batch that cannot be looked up does not fail here, where the other ranks would wait for this one, but in\n"
        "SokExchangeSizes, on all ranks at once.\n\n" SOK_LOOKUP_INPUTS_DOC
        "batch_messages: what SokBags gave as `message`, where it was asked; when it is not empty, this rank fails "
        "with it.\n"
        "unique_keys: [u] in send order: by owning rank, then table, then key. On a GPU, where u is not known yet, "
        "[n], of\nwhich the first u are valid.\n"
        "counts: [num_ranks, num_tables + 2 num_lookups + 1] what is asked of each rank: unique keys of each table, "
        "keys of\n"
        "each lookup that is pooled there, their row splits; the last column is 1 when this rank failed.\n"
        "inverse: [n] for each entry of lookups that are pooled here, the offset of its row among the exchanged "
        "rows.\n"
        "order: [n] these entries grouped by unique key.\n"
        "unique_splits: [n + 1] where each unique key's entries begin in `order`; the first u + 1 are valid.\n"
        "bag_keys: [m] the keys of lookups that are pooled at the owner, by owning rank, then by lookup.\n"
        "bag_splits: row splits of these, likewise.\n"
        "scales: what the sums of their bags are multiplied with, by lookup.\n"
        "message: why this rank failed, or empty. What a GPU finds wrong is not in it: SokExchangeSizes reads its "
        "error\nrecord.\n" SOK_TABLE_ATTRIBUTES_DOC SOK_LOOKUP_ATTRIBUTES_DOC
        "concat: whether all lookups must have as many bags, since their vectors are to be one array.\n");

namespace {

// A batch by where it is pooled.
struct RoutedBatch {
  std::vector<sok_lookup> rows, bags;
  std::vector<int64_t> bag_numbers;  // the numbers of `bags` among the lookups of the call
  int64_t num_splits = 0;            // of the parts of `bags`
  int64_t num_bags = 0;
};

bool LivesOn(const sok_placement& table, int rank) { return table.owner < 0 || table.owner == rank; }

// What an op writes.
struct RouteOutputs {
  Tensor keys, splits;  // of n and n + 1 elements; set as outputs when their sizes are known
  Tensor *counts, *inverse, *order, *bag_keys, *bag_splits, *scales, *message;

  absl::Status Allocate(OpKernelContext* ctx, const RoutedBatch& batch, int num_ranks, int64_t num_columns) {
    const int64_t n = LookupAttributes::NumEntries(batch.rows);
    TF_RETURN_IF_ERROR(ctx->allocate_temp(DT_INT64, {n}, &keys));
    TF_RETURN_IF_ERROR(ctx->allocate_temp(DT_INT32, {n + 1}, &splits));
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, {num_ranks, num_columns + 1}, &counts));
    TF_RETURN_IF_ERROR(ctx->allocate_output(2, {n}, &inverse));
    TF_RETURN_IF_ERROR(ctx->allocate_output(3, {n}, &order));
    TF_RETURN_IF_ERROR(ctx->allocate_output(5, {LookupAttributes::NumEntries(batch.bags)}, &bag_keys));
    TF_RETURN_IF_ERROR(ctx->allocate_output(6, {batch.num_splits}, &bag_splits));
    TF_RETURN_IF_ERROR(ctx->allocate_output(7, {batch.num_bags}, &scales));
    return ctx->allocate_output(8, {}, &message);
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

  sok_bag_routing BagRouting(const sok_tensor& count_view) const {
    sok_bag_routing routing = SOK_BAG_ROUTING_INIT;
    routing.keys = View(*bag_keys);
    routing.counts = count_view;
    routing.splits = View(*bag_splits);
    routing.scales = View(*scales);
    return routing;
  }
};

sok_tensor CountView(int64_t* data, int64_t num_ranks, int64_t columns) {
  return {data, SOK_INT64, 2, {num_ranks, columns}, 0};
}

}  // namespace

class RouteOp : public ::tensorflow::OpKernel {
 public:
  explicit RouteOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), tables_(ctx), lookups_(ctx, tables_.num_tables()), concat_(Attribute<bool>(ctx, "concat")) {}

  void Compute(OpKernelContext* ctx) override {
    const std::vector<sok_placement>& tables = tables_.tables();
    ::tensorflow::OpInputList messages;
    OP_REQUIRES_OK(ctx, ctx->input_list("batch_messages", &messages));
    absl::Status status;
    for (const Tensor& message : messages) {
      const std::string_view known = message.scalar<::tensorflow::tstring>()();
      if (status.ok() && !known.empty()) status = absl::InvalidArgumentError(known);
    }
    RoutedBatch batch;
    if (status.ok()) status = ReadBatch(ctx, tables, &batch);
    RouteOutputs outputs;
    OP_REQUIRES_OK(ctx, outputs.Allocate(ctx, batch, tables_.num_ranks(), num_columns()));
    int64_t unique = outputs.keys.NumElements();
    OP_REQUIRES_OK(ctx, OnGpu(ctx) ? OnDevice(ctx, tables, batch, &outputs, &status)
                                   : OnHost(ctx, tables, batch, &outputs, &status, &unique));
    outputs.message->scalar<::tensorflow::tstring>()() = std::string(status.message());
    ctx->set_output(0, outputs.keys.Slice(0, unique));
    ctx->set_output(4, outputs.splits);
  }

 private:
  // Without the one that says whether this rank failed.
  int64_t num_columns() const { return Messages::NumColumns(tables_.num_tables(), lookups_.num_lookups()); }

  // Leaves the batch empty when it fails.
  absl::Status ReadBatch(OpKernelContext* ctx, const std::vector<sok_placement>& tables, RoutedBatch* batch) const {
    std::vector<sok_lookup> lookups;
    TF_RETURN_IF_ERROR(lookups_.Read(ctx, tables, &lookups));
    if (concat_) TF_RETURN_IF_ERROR(CheckBagsAreAsMany(tables, lookups));
    std::vector<int32_t> at_owner(lookups.size());
    {
      CoreContext core(ctx);
      TF_RETURN_IF_ERROR(ToStatus(sok_choose_pooling(core.get(), tables_.num_tables(), tables.data(),
                                                     lookups_.num_lookups(), lookups.data(), at_owner.data())));
    }
    for (size_t i = 0; i < lookups.size(); ++i) {
      (at_owner[i] != 0 ? batch->bags : batch->rows).push_back(lookups[i]);
      if (at_owner[i] == 0) continue;
      const int64_t bags = LookupAttributes::NumBags(lookups[i]);
      batch->bag_numbers.push_back(static_cast<int64_t>(i));
      batch->num_bags += bags;
      for (int rank = 0; rank < tables_.num_ranks(); ++rank) {
        if (LivesOn(tables[lookups[i].table], rank)) batch->num_splits += bags + 1;
      }
    }
    return absl::OkStatus();
  }

  // The count matrix of outputs, in host memory: what shapes tell of it, 0 elsewhere.
  std::vector<int64_t> CountsOfShapes(const std::vector<sok_placement>& tables, const RoutedBatch& batch) const {
    const int64_t stride = num_columns() + 1;
    std::vector<int64_t> counts(static_cast<size_t>(tables_.num_ranks() * stride), 0);
    for (int rank = 0; rank < tables_.num_ranks(); ++rank) {
      int64_t* const splits = counts.data() + rank * stride + tables_.num_tables() + lookups_.num_lookups();
      for (size_t b = 0; b < batch.bags.size(); ++b) {
        if (!LivesOn(tables[batch.bags[b].table], rank)) continue;
        splits[batch.bag_numbers[b]] = LookupAttributes::NumBags(batch.bags[b]) + 1;
      }
    }
    return counts;
  }

  // Enqueues or runs what the core does; row_counts and bag_counts are on the op's device.
  absl::Status Route(const CoreContext& core, const std::vector<sok_placement>& tables, const RoutedBatch& batch,
                     const RouteOutputs& outputs, const sok_tensor& row_counts, const sok_tensor& bag_counts) const {
    if (!batch.rows.empty()) {
      const sok_routing routing = outputs.Routing(row_counts);
      TF_RETURN_IF_ERROR(
          SOK_TF_STATUS(sok_route(core.get(), static_cast<int32_t>(tables.size()), tables.data(),
                                  static_cast<int32_t>(batch.rows.size()), batch.rows.data(), &routing)));
    }
    if (batch.bags.empty()) return absl::OkStatus();
    const sok_bag_routing routing = outputs.BagRouting(bag_counts);
    return SOK_TF_STATUS(sok_route_bags(core.get(), static_cast<int32_t>(tables.size()), tables.data(),
                                        static_cast<int32_t>(batch.bags.size()), batch.bags.data(), &routing));
  }

  // `status`: whether the batch can be routed, as far as is known; the answer is part of the outputs.
  absl::Status OnHost(OpKernelContext* ctx, const std::vector<sok_placement>& tables, const RoutedBatch& batch,
                      RouteOutputs* outputs, absl::Status* status, int64_t* unique) const {
    const int num_ranks = tables_.num_ranks();
    const int num_tables = tables_.num_tables();
    const int64_t num_bags = static_cast<int64_t>(batch.bags.size());
    std::vector<int64_t> row_counts(static_cast<size_t>(num_ranks) * num_tables, 0), bag_counts(num_ranks * num_bags);
    if (status->ok()) {
      CoreContext core(ctx);
      *status = Route(core, tables, batch, *outputs, CountView(row_counts.data(), num_ranks, num_tables),
                      CountView(bag_counts.data(), num_ranks, num_bags));
    }
    *unique = 0;
    auto matrix = outputs->counts->matrix<int64_t>();
    if (!status->ok()) {
      matrix.setZero();
      for (int rank = 0; rank < num_ranks; ++rank) matrix(rank, num_columns()) = 1;
      return absl::OkStatus();
    }
    const std::vector<int64_t> counts = CountsOfShapes(tables, batch);
    std::copy(counts.begin(), counts.end(), matrix.data());
    for (int rank = 0; rank < num_ranks; ++rank) {
      for (int table = 0; table < num_tables; ++table) {
        const int64_t count = row_counts[static_cast<size_t>(rank) * num_tables + table];
        matrix(rank, table) = count;
        *unique += count;
      }
      for (int64_t b = 0; b < num_bags; ++b) {
        matrix(rank, num_tables + batch.bag_numbers[b]) = bag_counts[rank * num_bags + b];
      }
    }
    return absl::OkStatus();
  }

  // Nothing waits: the counts stay on the device, and so does the news whether the keys were right, which its error
  // record gives to the last column.
  absl::Status OnDevice(OpKernelContext* ctx, const std::vector<sok_placement>& tables, const RoutedBatch& batch,
                        RouteOutputs* outputs, absl::Status* status) const {
    const int num_ranks = tables_.num_ranks();
    const int64_t columns = num_columns();
    if (status->ok()) {
      CoreContext core(ctx);
      TF_RETURN_IF_ERROR(RouteOnDevice(ctx, core, tables, batch, outputs, status));
      int64_t* const flags = static_cast<int64_t*>(outputs->counts->data()) + columns;
      const sok_tensor last_column = {flags, SOK_INT64, 2, {num_ranks, 1}, columns + 1};
      if (status->ok()) *status = ToStatus(sok_error_record_flag(core.get(), last_column));
    }
    if (status->ok()) return absl::OkStatus();
    Tensor failed;
    TF_RETURN_IF_ERROR(AllocateHost(ctx, DT_INT64, outputs->counts->shape(), &failed));
    auto matrix = failed.matrix<int64_t>();
    matrix.setZero();
    for (int rank = 0; rank < num_ranks; ++rank) matrix(rank, columns) = 1;
    return CopyToGpu(ctx, failed, outputs->counts);
  }

  absl::Status RouteOnDevice(OpKernelContext* ctx, const CoreContext& core, const std::vector<sok_placement>& tables,
                             const RoutedBatch& batch, RouteOutputs* outputs, absl::Status* status) const {
    const int64_t num_ranks = tables_.num_ranks(), num_tables = tables_.num_tables(), stride = num_columns() + 1;
    if (batch.bags.empty()) {
      // Tables of one row that nobody looks up: the core makes room for the other columns, and writes 0 there.
      std::vector<sok_placement> all = tables;
      sok_placement column = tables.front();
      column.name = "column";
      column.owner = -1;
      column.num_rows = column.dimension = 1;
      all.resize(stride, column);
      *status = Route(core, all, batch, *outputs, View(*outputs->counts), Absent());
      return absl::OkStatus();
    }
    const std::vector<int64_t> counts = CountsOfShapes(tables, batch);
    TF_RETURN_IF_ERROR(EnqueueUpload(ctx, counts.data(), outputs->counts));
    const int64_t num_bags = static_cast<int64_t>(batch.bags.size());
    Tensor row_counts, bag_counts;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(DT_INT64, {num_ranks, num_tables}, &row_counts));
    TF_RETURN_IF_ERROR(ctx->allocate_temp(DT_INT64, {num_ranks, num_bags}, &bag_counts));
    *status = Route(core, tables, batch, *outputs, View(row_counts), View(bag_counts));
    if (!status->ok()) return absl::OkStatus();
    std::vector<sok_tensor> from, to;
    const auto copy = [&](const Tensor& source, int64_t rank, int64_t first, int64_t size, int64_t column) {
      int64_t* const data = static_cast<int64_t*>(source.data()) + rank * source.dim_size(1) + first;
      int64_t* const place = static_cast<int64_t*>(outputs->counts->data()) + rank * stride + column;
      from.push_back({data, SOK_INT64, 1, {size, 1}, 0});
      to.push_back({place, SOK_INT64, 1, {size, 1}, 0});
    };
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      if (!batch.rows.empty()) copy(row_counts, rank, 0, num_tables, 0);
      for (int64_t first = 0, last = 0; first < num_bags; first = last) {  // lookups that follow each other at once
        const int64_t number = batch.bag_numbers[first];
        for (last = first + 1; last < num_bags && batch.bag_numbers[last] == number + last - first;) ++last;
        copy(bag_counts, rank, first, last - first, num_tables + number);
      }
    }
    *status = ToStatus(sok_copy(core.get(), static_cast<int32_t>(from.size()), from.data(), to.data()));
    return absl::OkStatus();
  }

  TableAttributes tables_;
  LookupAttributes lookups_;
  bool concat_;
};

SOK_REGISTER_KERNELS("SokRoute", RouteOp);

}  // namespace sok::tf
