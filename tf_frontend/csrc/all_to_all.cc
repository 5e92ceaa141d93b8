// SPDX-License-Identifier: Apache-2.0
// all_to_all, swap_counts: the exchange of tensors on a GPU over the core's communicator.
#include <limits>
#include <vector>

#include "communicators.h"
#include "gpu.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok::tf {

using ::tensorflow::TensorShape;
using ::tensorflow::shape_inference::InferenceContext;

REGISTER_OP("SokAllToAll")
    .Input("communicator: resource")
    .Input("values: T")
    .Input("send_splits: Tsplits")
    .Input("receive_splits: Tsplits")
    .Output("received: T")
    .Attr("T: {bool, int8, uint8, int16, uint16, int32, uint32, int64, uint64, half, bfloat16, float, double}")
    .Attr("Tsplits: {int32, int64}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ::tensorflow::shape_inference::ShapeHandle values, splits, received;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(1), 1, &values));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &splits));
      TF_RETURN_IF_ERROR(c->Merge(splits, c->input(3), &splits));
      TF_RETURN_IF_ERROR(c->ReplaceDim(values, 0, c->UnknownDim(), &received));
      c->set_output(0, received);
      return absl::OkStatus();
    })
    .Doc(
        "Sends the first send_splits[0] entries of `values` to rank 0, the next send_splits[1] to rank 1, and so on. "
        "All ranks run\n"
        "it in the same order. Enqueued; nothing waits.\n\n"
        "communicator: what SokCommunicatorHandle gave; of the op's GPU.\n"
        "values: [n, ...] on the GPU.\n"
        "send_splits: [num_ranks] entries for each rank, n together.\n"
        "receive_splits: [num_ranks] entries that come from each rank.\n"
        "received: [sum(receive_splits), ...] what came, by source rank.\n");

REGISTER_OP("SokSwapCounts")
    .Input("communicator: resource")
    .Input("counts: int64")
    .Output("sent: int64")
    .Output("received: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ::tensorflow::shape_inference::ShapeHandle counts;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &counts));
      c->set_output(0, counts);
      c->set_output(1, counts);
      return absl::OkStatus();
    })
    .Doc(
        "Sends row r of `counts` to rank r and waits for what comes, and with it for all that was enqueued before. The "
        "last column\n"
        "says whether the sender failed. Fails when an exchange has failed.\n\n"
        "communicator: what SokCommunicatorHandle gave; of the op's GPU.\n"
        "counts: [num_ranks, k] on the GPU, k >= 1.\n"
        "sent: `counts` in host memory, with 1 in the last column where the GPU has found something wrong.\n"
        "received: as `counts`, in host memory; row s came from rank s.\n");

#if defined(SOK_WITH_CUDA)
namespace {

// Entries of each rank as elements of `width` to an entry; they must be num_ranks numbers that add up to at most what
// 64 bits hold.
absl::Status ToCounts(const Tensor& splits, int64_t num_ranks, int64_t width, const char* what,
                      std::vector<int64_t>* counts, int64_t* entries) {
  if (splits.dims() != 1 || splits.dim_size(0) != num_ranks) {
    return errors::InvalidArgument(what, " must be [", num_ranks, "], not ", splits.shape().DebugString());
  }
  counts->resize(num_ranks);
  *entries = 0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const int64_t count =
        splits.dtype() == ::tensorflow::DT_INT32 ? splits.vec<int32_t>()(rank) : splits.vec<int64_t>()(rank);
    int64_t elements = 0;
    if (count < 0 || __builtin_add_overflow(*entries, count, entries) ||
        __builtin_mul_overflow(*entries, width, &elements)) {
      return errors::InvalidArgument(what, "[", rank, "] is ", count, ": negative, or more than there can be");
    }
    (*counts)[rank] = count * width;
  }
  return absl::OkStatus();
}

// Elements travel as they are: any dtype of the core that has their size will do.
sok_tensor FlatView(const Tensor& tensor) {
  sok_tensor view = SOK_NO_TENSOR;
  view.data = tensor.NumElements() > 0 ? tensor.data() : nullptr;
  view.rank = 1;
  view.shape[0] = tensor.NumElements();
  switch (::tensorflow::DataTypeSize(tensor.dtype())) {
    case 1:
      view.dtype = SOK_UINT8;
      break;
    case 2:
      view.dtype = SOK_FLOAT16;
      break;
    case 4:
      view.dtype = SOK_INT32;
      break;
    default:
      view.dtype = SOK_INT64;
  }
  return view;
}

class AllToAllOp : public ::tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    sok_communicator* communicator = nullptr;
    OP_REQUIRES_OK(ctx, GetCommunicator(ctx, &communicator));
    const Tensor& values = ctx->input(1);
    OP_REQUIRES(ctx, values.dims() >= 1, errors::InvalidArgument("values must have at least one dimension"));
    int64_t width = 1;
    for (int i = 1; i < values.dims(); ++i) width *= values.dim_size(i);
    const int64_t num_ranks = sok_communicator_num_ranks(communicator);
    std::vector<int64_t> send_counts, receive_counts;
    int64_t sent = 0, received = 0;
    OP_REQUIRES_OK(ctx, ToCounts(ctx->input(2), num_ranks, width, "send_splits", &send_counts, &sent));
    OP_REQUIRES_OK(ctx, ToCounts(ctx->input(3), num_ranks, width, "receive_splits", &receive_counts, &received));
    OP_REQUIRES(
        ctx, sent == values.dim_size(0),
        errors::InvalidArgument("send_splits add up to ", sent, ", but values has ", values.dim_size(0), " entries"));
    TensorShape shape = values.shape();
    OP_REQUIRES_OK(ctx, shape.SetDimWithStatus(0, received));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &output));
    CoreContext core(ctx);
    SOK_TF_CALL(ctx, sok_all_to_all(core.get(), communicator, FlatView(values), send_counts.data(), FlatView(*output),
                                    receive_counts.data()));
  }
};

REGISTER_KERNEL_BUILDER(Name("SokAllToAll")
                            .Device(::tensorflow::DEVICE_GPU)
                            .HostMemory("communicator")
                            .HostMemory("send_splits")
                            .HostMemory("receive_splits"),
                        AllToAllOp);

class SwapCountsOp : public ::tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    sok_communicator* communicator = nullptr;
    OP_REQUIRES_OK(ctx, GetCommunicator(ctx, &communicator));
    const Tensor& counts = ctx->input(1);
    const int64_t num_ranks = sok_communicator_num_ranks(communicator);
    OP_REQUIRES(ctx, counts.dims() == 2 && counts.dim_size(0) == num_ranks,
                errors::InvalidArgument("counts must be [", num_ranks, ", k], not ", counts.shape().DebugString()));
    Tensor *sent = nullptr, *received = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, counts.shape(), &sent));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, counts.shape(), &received));
    CoreContext core(ctx);
    SOK_TF_CALL(ctx, sok_swap_counts(core.get(), communicator, View(counts), static_cast<int64_t*>(sent->data()),
                                     static_cast<int64_t*>(received->data())));
  }
};

REGISTER_KERNEL_BUILDER(Name("SokSwapCounts")
                            .Device(::tensorflow::DEVICE_GPU)
                            .HostMemory("communicator")
                            .HostMemory("sent")
                            .HostMemory("received"),
                        SwapCountsOp);

}  // namespace
#endif

}  // namespace sok::tf
