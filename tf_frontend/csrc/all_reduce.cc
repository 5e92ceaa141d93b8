// SPDX-License-Identifier: Apache-2.0
// all_reduce: tensors on a GPU, gradients of dense layers above all, reduced over the ranks by the core's communicator.
#include <vector>

#include "communicators.h"
#include "gpu.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok::tf {

REGISTER_OP("SokAllReduce")
    .Input("communicator: resource")
    .Input("values: N * T")
    .Output("reduced: N * T")
    .Attr("N: int >= 1")
    .Attr("T: {half, bfloat16, float, double, int64}")
    .Attr("reduction: int >= 0")
    .SetIsStateful()
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i + 1));
      return absl::OkStatus();
    })
    .Doc(
        "Reduces tensors over the ranks, element by element. All ranks run it in the same order, with tensors of the "
        "same shapes.\n"
        "Enqueued; nothing waits.\n\n"
        "communicator: what SokCommunicatorHandle gave; of the op's GPU, and prepared for reductions.\n"
        "values: on the GPU.\n"
        "reduced: the same of all ranks; in the memory of `values` where nothing else needs it.\n"
        "reduction: a sok_reduction.\n");

#if defined(SOK_WITH_CUDA)
namespace {

sok_tensor FlatView(const Tensor& tensor) {
  sok_tensor view = View(tensor);
  view.rank = 1;
  view.shape[0] = tensor.NumElements();
  view.row_stride = 0;
  return view;
}

class AllReduceOp : public ::tensorflow::OpKernel {
 public:
  explicit AllReduceOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), reduction_(static_cast<int32_t>(Attribute<int64_t>(ctx, "reduction"))) {}

  void Compute(OpKernelContext* ctx) override {
    sok_communicator* communicator = nullptr;
    OP_REQUIRES_OK(ctx, GetCommunicator(ctx, &communicator));
    std::vector<sok_tensor> send, receive;
    for (int i = 0; i < ctx->num_outputs(); ++i) {
      const Tensor& values = ctx->input(i + 1);
      send.push_back(FlatView(values));
      Tensor* reduced = nullptr;
      OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({i + 1}, i, values.shape(), &reduced));
      receive.push_back(FlatView(*reduced));
    }
    CoreContext core(ctx);
    SOK_TF_CALL(ctx,
                sok_all_reduce(core.get(), communicator, reduction_, ctx->num_outputs(), send.data(), receive.data()));
  }

 private:
  int32_t reduction_;
};

REGISTER_KERNEL_BUILDER(Name("SokAllReduce").Device(::tensorflow::DEVICE_GPU).HostMemory("communicator"), AllReduceOp);

}  // namespace
#endif

}  // namespace sok::tf
