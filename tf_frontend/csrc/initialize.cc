// SPDX-License-Identifier: Apache-2.0
// initialize: first rows of a shard, the same for every number of ranks.
#include "gpu.h"
#include "support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok::tf {

REGISTER_OP("SokInitialize")
    .Input("parameters: float64")
    .Output("rows: dtype")
    .Attr("num_rows: int >= 0")
    .Attr("dimension: int >= 1")
    .Attr("first_key: int")
    .Attr("key_stride: int")
    .Attr("kind: int")
    .Attr("seed: int")
    .Attr("dtype: {float, half, bfloat16} = DT_FLOAT")
    .SetIsStateful()  // or grappler folds it into a constant, a second copy of the table
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      int64_t num_rows = 0, dimension = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("num_rows", &num_rows));
      TF_RETURN_IF_ERROR(c->GetAttr("dimension", &dimension));
      c->set_output(0, c->Matrix(num_rows, dimension));
      return absl::OkStatus();
    })
    .Doc(
        "Initial rows of the keys first_key + i * key_stride: a pure function of seed, key and column.\n\n"
        "parameters: [2] a and b of sok_initializer.\n"
        "rows: [num_rows, dimension], float32 numbers rounded to dtype.\n"
        "kind: sok_initializer_kind.\n"
        "seed: the 64 bits of the seed, as a signed number.\n");

class InitializeOp : public ::tensorflow::OpKernel {
 public:
  explicit InitializeOp(OpKernelConstruction* ctx)
      : OpKernel(ctx),
        num_rows_(Attribute<int64_t>(ctx, "num_rows")),
        dimension_(Attribute<int64_t>(ctx, "dimension")),
        first_key_(Attribute<int64_t>(ctx, "first_key")),
        key_stride_(Attribute<int64_t>(ctx, "key_stride")),
        kind_(Attribute<int>(ctx, "kind")),
        seed_(Attribute<int64_t>(ctx, "seed")) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& parameters = ctx->input(0);
    OP_REQUIRES(ctx, parameters.NumElements() == 2, errors::InvalidArgument("parameters must be two numbers"));
    sok_initializer initializer = SOK_INITIALIZER_INIT;
    initializer.kind = kind_;
    initializer.seed = static_cast<uint64_t>(seed_);
    initializer.a = parameters.flat<double>()(0);
    initializer.b = parameters.flat<double>()(1);
    ::tensorflow::TensorShape shape;  // made so that a size that overflows is an error and not the end of the process
    OP_REQUIRES_OK(ctx, ::tensorflow::TensorShape::BuildTensorShape({num_rows_, dimension_}, &shape));
    Tensor* rows = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &rows));
    CoreContext core(ctx);
    SOK_TF_CALL(ctx, sok_initialize(core.get(), &initializer, Absent(), first_key_, key_stride_, View(*rows)));
  }

 private:
  int64_t num_rows_, dimension_, first_key_, key_stride_;
  int kind_;
  int64_t seed_;
};

SOK_REGISTER_KERNELS("SokInitialize", InitializeOp, .HostMemory("parameters"));

}  // namespace sok::tf
