// SPDX-License-Identifier: Apache-2.0
// exchange_sizes: how much travels where, or the error that all ranks raise together.
#include <limits>

#include "device_errors.h"
#include "gpu.h"
#include "support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok::tf {

using ::tensorflow::shape_inference::InferenceContext;

REGISTER_OP("SokExchangeSizes")
    .Input("sent: int64")
    .Input("received: int64")
    .Input("message: string")
    .Input("unique_keys: int64")
    .Output("requests: int64")
    .Output("counts: int64")
    .Output("key_send_splits: int32")
    .Output("key_receive_splits: int32")
    .Output("row_send_splits: int32")
    .Output("row_receive_splits: int32")
    .Output("keys: int64")
    .Attr("dimensions: list(int) >= 1")
    .Attr("rank: int >= 0")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> dimensions;
      TF_RETURN_IF_ERROR(c->GetAttr("dimensions", &dimensions));
      ::tensorflow::shape_inference::ShapeHandle sent;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &sent));
      TF_RETURN_IF_ERROR(c->Merge(sent, c->input(1), &sent));
      const auto ranks = c->Dim(sent, 0);
      for (int i = 0; i < 2; ++i) c->set_output(i, c->Matrix(ranks, static_cast<int64_t>(dimensions.size())));
      for (int i = 2; i < 6; ++i) c->set_output(i, c->Vector(ranks));
      c->set_output(6, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(
        "Splits of the exchanges of keys and rows. Fails on every rank when a rank's batch could not be looked up: "
        "there with\n"
        "that rank's message, elsewhere with its number.\n\n"
        "sent: [num_ranks, num_tables + 1] what SokRoute gave as `counts`.\n"
        "received: the same after the exchange: row s came from rank s.\n"
        "message: what SokRoute gave.\n"
        "unique_keys: what SokRoute gave.\n"
        "requests: [num_ranks, num_tables] keys that this rank asks of each rank.\n"
        "counts: [num_ranks, num_tables] keys that each rank asks of this one.\n"
        "key_send_splits: [num_ranks] keys sent to each rank.\n"
        "key_receive_splits: [num_ranks] keys received from each rank.\n"
        "row_send_splits: [num_ranks] elements of rows sent to each rank.\n"
        "row_receive_splits: [num_ranks] elements of rows received from each rank.\n"
        "keys: [sum(key_send_splits)] the valid ones of unique_keys.\n"
        "dimensions: elements a row of each table.\n"
        "rank: this process.\n");

class ExchangeSizesOp : public ::tensorflow::OpKernel {
 public:
  explicit ExchangeSizesOp(OpKernelConstruction* ctx)
      : OpKernel(ctx),
        dimensions_(Attribute<std::vector<int64_t>>(ctx, "dimensions")),
        rank_(Attribute<int>(ctx, "rank")) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& sent = ctx->input(0);
    const Tensor& received = ctx->input(1);
    const int64_t tables = static_cast<int64_t>(dimensions_.size());
    OP_REQUIRES(ctx, sent.dims() == 2 && sent.dim_size(1) == tables + 1 && received.shape() == sent.shape(),
                errors::InvalidArgument("sent and received must be [num_ranks, ", tables + 1, "], not ",
                                        sent.shape().DebugString(), " and ", received.shape().DebugString()));
    const int64_t ranks = sent.dim_size(0);
    const auto sent_counts = sent.matrix<int64_t>();
    const auto received_counts = received.matrix<int64_t>();
    if (ranks > 0 && sent_counts(0, tables) != 0) OP_REQUIRES_OK(ctx, OwnFailure(ctx));
    for (int64_t source = 0; source < ranks; ++source) {
      OP_REQUIRES(ctx, received_counts(source, tables) == 0,
                  errors::InvalidArgument(
                      "rank ", source, " could not look up its batch (its own message says why), so ", "no rank does"));
    }
    Tensor* outputs[6];
    for (int i = 0; i < 6; ++i) {
      const ::tensorflow::TensorShape shape =
          i < 2 ? ::tensorflow::TensorShape({ranks, tables}) : ::tensorflow::TensorShape({ranks});
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, shape, &outputs[i]));
    }
    for (int64_t rank = 0; rank < ranks; ++rank) {
      int64_t keys[2] = {0, 0};
      int64_t elements[2] = {0, 0};
      for (int64_t table = 0; table < tables; ++table) {
        const int64_t count[2] = {sent_counts(rank, table), received_counts(rank, table)};
        for (int way = 0; way < 2; ++way) {
          outputs[way]->matrix<int64_t>()(rank, table) = count[way];
          keys[way] += count[way];
          elements[way] += count[way] * dimensions_[table];
        }
      }
      for (int way = 0; way < 2; ++way) {
        OP_REQUIRES(ctx, elements[way] <= std::numeric_limits<int32_t>::max(),
                    errors::Unimplemented("rank ", rank_, " exchanges ", elements[way], " elements with rank ", rank,
                                          ": more than 2^31 in one step; make the batch smaller"));
        outputs[2 + way]->vec<int32_t>()(rank) = static_cast<int32_t>(keys[way]);
        // Rows travel against the keys: sent for the keys that came, received for the keys that went.
        outputs[5 - way]->vec<int32_t>()(rank) = static_cast<int32_t>(elements[way]);
      }
    }
    int64_t num_keys = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) num_keys += outputs[2]->vec<int32_t>()(rank);
    const Tensor& unique_keys = ctx->input(3);
    OP_REQUIRES(
        ctx, unique_keys.dims() == 1 && unique_keys.dim_size(0) >= num_keys,
        errors::InvalidArgument("unique_keys must hold ", num_keys, " keys, not ", unique_keys.shape().DebugString()));
    ctx->set_output(6, unique_keys.Slice(0, num_keys));
  }

 private:
  // Why this rank could not look up its batch.
  absl::Status OwnFailure(OpKernelContext* ctx) const {
    std::string message(std::string_view(ctx->input(2).scalar<::tensorflow::tstring>()()));
    if (message.empty()) message = CheckDevice(ctx).message();
    return errors::InvalidArgument("on rank ", rank_, ": ", message);
  }

  std::vector<int64_t> dimensions_;
  int rank_;
};

SOK_REGISTER_KERNELS("SokExchangeSizes", ExchangeSizesOp,
                     .HostMemory("sent")
                         .HostMemory("received")
                         .HostMemory("requests")
                         .HostMemory("counts")
                         .HostMemory("key_send_splits")
                         .HostMemory("key_receive_splits")
                         .HostMemory("row_send_splits")
                         .HostMemory("row_receive_splits"));

}  // namespace sok::tf
