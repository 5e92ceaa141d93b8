// SPDX-License-Identifier: Apache-2.0
// exchange_sizes: the messages of keys and how much travels where, or the error that all ranks raise together.
#include <limits>

#include "device_errors.h"
#include "gpu.h"
#include "lookups.h"
#include "messages.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok::tf {

using ::tensorflow::shape_inference::InferenceContext;

REGISTER_OP("SokExchangeSizes")
    .Input("sent: int64")
    .Input("received: int64")
    .Input("message: string")
    .Input("unique_keys: int64")
    .Input("bag_keys: int64")
    .Input("bag_splits: int64")
    .Output("key_send_splits: int32")
    .Output("key_receive_splits: int32")
    .Output("row_send_splits: int32")
    .Output("row_receive_splits: int32")
    .Output("keys: int64")
    .Attr("dimensions: list(int) >= 1")
    .Attr("lookup_tables: list(int) >= 1")
    .Attr("rank: int >= 0")
    .SetShapeFn([](InferenceContext* c) {
      ::tensorflow::shape_inference::ShapeHandle sent;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &sent));
      TF_RETURN_IF_ERROR(c->Merge(sent, c->input(1), &sent));
      const auto ranks = c->Dim(sent, 0);
      for (int i = 0; i < 4; ++i) c->set_output(i, c->Vector(ranks));
      c->set_output(4, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(
        "What this rank sends as keys, and the splits of the exchanges of keys and rows. Fails on every rank when a "
        "rank's batch\n"
        "could not be looked up: there with that rank's message, elsewhere with its number.\n\n"
        "sent: [num_ranks, num_tables + 2 num_lookups + 1] what SokRoute gave as `counts`.\n"
        "received: the same after the exchange: row s came from rank s.\n"
        "message: what SokRoute gave.\n"
        "unique_keys: what SokRoute gave.\n"
        "bag_keys: what SokRoute gave.\n"
        "bag_splits: what SokRoute gave.\n"
        "key_send_splits: [num_ranks] keys and row splits sent to each rank.\n"
        "key_receive_splits: [num_ranks] keys and row splits received from each rank.\n"
        "row_send_splits: [num_ranks] elements of rows and of sums of rows sent to each rank.\n"
        "row_receive_splits: [num_ranks] elements of rows and of sums of rows received from each rank.\n"
        "keys: [sum(key_send_splits)] for each rank: its valid ones of unique_keys, its bag_keys, its bag_splits.\n"
        "dimensions: elements a row of each table.\n"
        "lookup_tables: position of each lookup's table.\n"
        "rank: this process.\n");

class ExchangeSizesOp : public ::tensorflow::OpKernel {
 public:
  explicit ExchangeSizesOp(OpKernelConstruction* ctx)
      : OpKernel(ctx),
        dimensions_(Attribute<std::vector<int64_t>>(ctx, "dimensions")),
        lookup_tables_(LookupTables(ctx, static_cast<int>(dimensions_.size()))),
        rank_(Attribute<int>(ctx, "rank")) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor &sent = ctx->input(0), &received = ctx->input(1);
    const int64_t columns = Messages::NumColumns(dimensions_.size(), lookup_tables_.size());
    OP_REQUIRES(ctx, sent.dims() == 2 && sent.dim_size(1) == columns && received.shape() == sent.shape(),
                errors::InvalidArgument("sent and received must be [num_ranks, ", columns, "], not ",
                                        sent.shape().DebugString(), " and ", received.shape().DebugString()));
    const int64_t ranks = sent.dim_size(0);
    if (ranks > 0 && sent.matrix<int64_t>()(0, columns - 1) != 0) OP_REQUIRES_OK(ctx, OwnFailure(ctx));
    for (int64_t source = 0; source < ranks; ++source) {
      OP_REQUIRES(ctx, received.matrix<int64_t>()(source, columns - 1) == 0,
                  errors::InvalidArgument(
                      "rank ", source, " could not look up its batch (its own message says why), so ", "no rank does"));
    }
    Messages asks, asked;
    OP_REQUIRES_OK(ctx, asks.Read(sent, dimensions_, lookup_tables_));
    OP_REQUIRES_OK(ctx, asked.Read(received, dimensions_, lookup_tables_));
    // Rows travel against the keys: sent for the keys that came, received for the keys that went.
    int output = 0;
    for (const std::vector<int64_t>* sizes : {&asks.keys(), &asked.keys(), &asked.floats(), &asks.floats()}) {
      OP_REQUIRES_OK(ctx, SetSplits(ctx, output++, *sizes));
    }
    OP_REQUIRES_OK(ctx, SetKeys(ctx, asks));
  }

 private:
  absl::Status SetSplits(OpKernelContext* ctx, int output, const std::vector<int64_t>& sizes) const {
    Tensor* splits = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(output, {static_cast<int64_t>(sizes.size())}, &splits));
    for (size_t rank = 0; rank < sizes.size(); ++rank) {
      if (sizes[rank] > std::numeric_limits<int32_t>::max()) {
        return errors::Unimplemented("rank ", rank_, " exchanges ", sizes[rank], " elements with rank ", rank,
                                     ": more than 2^31 in one step; make the batch smaller");
      }
      splits->vec<int32_t>()(rank) = static_cast<int32_t>(sizes[rank]);
    }
    return absl::OkStatus();
  }

  // Output 4. Where only rows are asked for it is the unique keys themselves.
  absl::Status SetKeys(OpKernelContext* ctx, const Messages& messages) const {
    const Tensor &unique_keys = ctx->input(3), &bag_keys = ctx->input(4), &bag_splits = ctx->input(5);
    if (messages->num_bag_splits == 0) {
      if (unique_keys.dims() != 1 || unique_keys.dim_size(0) < messages->num_keys) {
        return errors::InvalidArgument("unique_keys must have ", messages->num_keys, " elements at least, not ",
                                       unique_keys.shape().DebugString());
      }
      ctx->set_output(4, unique_keys.Slice(0, messages->num_keys));
      return absl::OkStatus();
    }
    Tensor* keys = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(4, {messages->num_keys}, &keys));
    sok_routing routing = SOK_ROUTING_INIT;
    routing.keys = View(unique_keys);
    routing.bag_keys = View(bag_keys);
    routing.bag_splits = View(bag_splits);
    CoreContext core(ctx);
    return ToStatus(sok_join_keys(core.get(), messages.get(), &routing, View(*keys)));
  }

  // Why this rank could not look up its batch.
  absl::Status OwnFailure(OpKernelContext* ctx) const {
    std::string message(std::string_view(ctx->input(2).scalar<::tensorflow::tstring>()()));
    if (message.empty()) message = CheckDevice(ctx).message();
    return errors::InvalidArgument("on rank ", rank_, ": ", message);
  }

  std::vector<int64_t> dimensions_;
  std::vector<int64_t> lookup_tables_;
  int rank_;
};

SOK_REGISTER_KERNELS("SokExchangeSizes", ExchangeSizesOp,
                     .HostMemory("sent")
                         .HostMemory("received")
                         .HostMemory("key_send_splits")
                         .HostMemory("key_receive_splits")
                         .HostMemory("row_send_splits")
                         .HostMemory("row_receive_splits"));

}  // namespace sok::tf
