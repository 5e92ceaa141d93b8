// SPDX-License-Identifier: Apache-2.0
// read_number: a scalar variable as a number in host memory, which waits for a GPU only when the variable has changed.
#include <deque>
#include <mutex>

#include "gpu.h"
#include "tables.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok::tf {

REGISTER_OP("SokReadNumber")
    .Input("variables: num_variables * resource")
    .Output("number: float32")
    .Attr("num_variables: int = 1")
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(
        "The value of a scalar variable, in host memory: a learning rate, for example. On a GPU it is fetched, which\n"
        "waits for all work enqueued before, only when the variable is not what it was when it was last "
        "fetched.\n\n"
        "variables: the variable, of a floating type or int64.\n"
        "number: its value.\n");

namespace {

absl::Status ToFloat(const Tensor& scalar, float* number) {
  switch (scalar.dtype()) {
    case ::tensorflow::DT_FLOAT:
      *number = scalar.flat<float>()(0);
      return absl::OkStatus();
    case ::tensorflow::DT_DOUBLE:
      *number = static_cast<float>(scalar.flat<double>()(0));
      return absl::OkStatus();
    case ::tensorflow::DT_HALF:
      *number = static_cast<float>(scalar.flat<Eigen::half>()(0));
      return absl::OkStatus();
    case ::tensorflow::DT_BFLOAT16:
      *number = static_cast<float>(scalar.flat<::tensorflow::bfloat16>()(0));
      return absl::OkStatus();
    case ::tensorflow::DT_INT64:
      *number = static_cast<float>(scalar.flat<int64_t>()(0));
      return absl::OkStatus();
    default:
      return errors::InvalidArgument("a number must be floating or int64, not ",
                                     ::tensorflow::DataTypeString(scalar.dtype()));
  }
}

}  // namespace

// TensorFlow never writes into a variable's buffer that somebody else holds: it gives the variable another one. So as
// long as the buffer of the last fetch is held here and is still the variable's, the number is still right. Variables
// in copy-on-read mode are written in place and are fetched each time.
class ReadNumberOp : public ::tensorflow::OpKernel {
 public:
  explicit ReadNumberOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES(ctx, Attribute<int>(ctx, "num_variables") == 1, errors::InvalidArgument("one variable at a time"));
  }

  void Compute(OpKernelContext* ctx) override {
    float number = 0.0f;
    OP_REQUIRES_OK(ctx, Read(ctx, &number));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &output));
    output->scalar<float>()() = number;
  }

 private:
  struct Known {
    Tensor buffer;
    float number;
  };
  static constexpr size_t kMostKnown = 8;  // eager ops of all variables are one kernel

  absl::Status Read(OpKernelContext* ctx, float* number) {
    VariableLocks locks;
    TF_RETURN_IF_ERROR(locks.Lock(ctx, {"variables"}, VariableLocks::kShared));
    const Tensor& value = *locks.tensor(0);
    if (value.NumElements() != 1) {
      return errors::InvalidArgument("a number must be a scalar, not of shape ", value.shape().DebugString());
    }
    if (!OnGpu(ctx)) return ToFloat(value, number);
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Known& known : known_) {
      if (known.buffer.SharesBufferWith(value) && known.buffer.data() == value.data()) {
        *number = known.number;
        return absl::OkStatus();
      }
    }
    Tensor on_host;
    TF_RETURN_IF_ERROR(AllocateHost(ctx, value.dtype(), value.shape(), &on_host));
    TF_RETURN_IF_ERROR(CopyToHost(ctx, value, &on_host));
    TF_RETURN_IF_ERROR(ToFloat(on_host, number));
    if (!locks.is_copied_on_read(0)) {
      known_.push_front({value, *number});
      if (known_.size() > kMostKnown) known_.pop_back();
    }
    return absl::OkStatus();
  }

  std::mutex mutex_;
  std::deque<Known> known_;
};

SOK_REGISTER_KERNELS("SokReadNumber", ReadNumberOp, .HostMemory("number"));

}  // namespace sok::tf
