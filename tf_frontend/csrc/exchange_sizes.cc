// SPDX-License-Identifier: Apache-2.0
// exchange_sizes: the messages of keys and how much travels where, or the error that all ranks raise together.
#include <algorithm>
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
    const Tensor& sent = ctx->input(0);
    const Tensor& received = ctx->input(1);
    const int64_t columns = Messages::NumColumns(dimensions_.size(), lookup_tables_.size());
    OP_REQUIRES(ctx, sent.dims() == 2 && sent.dim_size(1) == columns + 1 && received.shape() == sent.shape(),
                errors::InvalidArgument("sent and received must be [num_ranks, ", columns + 1, "], not ",
                                        sent.shape().DebugString(), " and ", received.shape().DebugString()));
    const int64_t ranks = sent.dim_size(0);
    const auto sent_counts = sent.matrix<int64_t>();
    const auto received_counts = received.matrix<int64_t>();
    if (ranks > 0 && sent_counts(0, columns) != 0) OP_REQUIRES_OK(ctx, OwnFailure(ctx));
    for (int64_t source = 0; source < ranks; ++source) {
      OP_REQUIRES(ctx, received_counts(source, columns) == 0,
                  errors::InvalidArgument(
                      "rank ", source, " could not look up its batch (its own message says why), so ", "no rank does"));
    }
    Messages messages[2];  // what this rank asks for, and what is asked of it
    OP_REQUIRES_OK(ctx, messages[0].Read(sent, dimensions_, lookup_tables_));
    OP_REQUIRES_OK(ctx, messages[1].Read(received, dimensions_, lookup_tables_));
    Tensor* splits[4];
    for (int i = 0; i < 4; ++i) OP_REQUIRES_OK(ctx, ctx->allocate_output(i, {ranks}, &splits[i]));
    for (int way = 0; way < 2; ++way) {
      const Messages& each = messages[way];
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const int64_t keys = each.key_elements(rank), elements = each.float_elements(rank);
        OP_REQUIRES(
            ctx, std::max(keys, elements) <= std::numeric_limits<int32_t>::max(),
            errors::Unimplemented("rank ", rank_, " exchanges ", std::max(keys, elements), " elements with rank ", rank,
                                  ": more than 2^31 in one step; make the batch smaller"));
        splits[way]->vec<int32_t>()(rank) = static_cast<int32_t>(keys);
        // Rows travel against the keys: sent for the keys that came, received for the keys that went.
        splits[3 - way]->vec<int32_t>()(rank) = static_cast<int32_t>(elements);
      }
    }
    OP_REQUIRES_OK(ctx, SetKeys(ctx, messages[0]));
  }

 private:
  // The last output. Where only rows are asked for it is the unique keys themselves.
  absl::Status SetKeys(OpKernelContext* ctx, const Messages& messages) const {
    const Tensor &unique_keys = ctx->input(3), &bag_keys = ctx->input(4), &bag_splits = ctx->input(5);
    const int64_t num_keys = messages.total(SOK_SECTION_KEYS), num_bag_keys = messages.total(SOK_SECTION_BAG_KEYS);
    const int64_t num_splits = messages.total(SOK_SECTION_BAG_SPLITS);
    if (unique_keys.dims() != 1 || unique_keys.dim_size(0) < num_keys || bag_keys.NumElements() != num_bag_keys ||
        bag_splits.NumElements() != num_splits) {
      return errors::InvalidArgument("unique_keys, bag_keys and bag_splits must hold ", num_keys, ", ", num_bag_keys,
                                     " and ", num_splits, ", not ", unique_keys.shape().DebugString(), ", ",
                                     bag_keys.shape().DebugString(), " and ", bag_splits.shape().DebugString());
    }
    if (num_splits == 0) {
      ctx->set_output(4, unique_keys.Slice(0, num_keys));
      return absl::OkStatus();
    }
    Tensor* keys = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(4, {num_keys + num_bag_keys + num_splits}, &keys));
    return messages.Join(CoreContext(ctx), SOK_SECTION_KEYS, {View(unique_keys), View(bag_keys), View(bag_splits)},
                         View(*keys));
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
