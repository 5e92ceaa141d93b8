// SPDX-License-Identifier: Apache-2.0
// read_number, count_step: a scalar variable as a number in host memory. It is fetched from a GPU, which waits, only
// when nobody can tell what it is.
#include <mutex>
#include <unordered_map>

#include "gpu.h"
#include "tables.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok::tf {

using ::tensorflow::shape_inference::InferenceContext;

REGISTER_OP("SokReadNumber")
    .Input("variables: num_variables * resource")
    .Output("number: dtype")
    .Attr("num_variables: int = 1")
    .Attr("dtype: {float, int64} = DT_FLOAT")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(
        "The value of a scalar variable, in host memory: a learning rate, for example. On a GPU it is fetched, which\n"
        "waits for all work enqueued before, only when the variable is not what it was when it was last fetched, or\n"
        "counted by SokCountStep.\n\n"
        "variables: the variable, of a floating type or int64.\n"
        "number: its value.\n"
        "dtype: of the number; int64 for int64 variables only.\n");

REGISTER_OP("SokCountStep")
    .Input("variables: num_variables * resource")
    .Attr("num_variables: int = 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext*) { return absl::OkStatus(); })
    .Doc(
        "Says that 1 was added to a variable since SokReadNumber saw it, so that the next one need not fetch it.\n\n"
        "variables: the variable, a scalar of int64. The caller vouches that nothing else was written to it.\n");

namespace {

struct Number {
  float value = 0.0f;
  int64_t integer = 0;  // of int64 variables
};

absl::Status ToNumber(const Tensor& scalar, Number* number) {
  switch (scalar.dtype()) {
    case ::tensorflow::DT_FLOAT:
      number->value = scalar.flat<float>()(0);
      return absl::OkStatus();
    case ::tensorflow::DT_DOUBLE:
      number->value = static_cast<float>(scalar.flat<double>()(0));
      return absl::OkStatus();
    case ::tensorflow::DT_HALF:
      number->value = static_cast<float>(scalar.flat<Eigen::half>()(0));
      return absl::OkStatus();
    case ::tensorflow::DT_BFLOAT16:
      number->value = static_cast<float>(scalar.flat<::tensorflow::bfloat16>()(0));
      return absl::OkStatus();
    case ::tensorflow::DT_INT64:
      number->integer = scalar.flat<int64_t>()(0);
      number->value = static_cast<float>(number->integer);
      return absl::OkStatus();
    default:
      return errors::InvalidArgument("a number must be floating or int64, not ",
                                     ::tensorflow::DataTypeString(scalar.dtype()));
  }
}

// The numbers of this process's variables, as far as they are known.
//
// TensorFlow never writes into a variable's buffer that somebody else holds: it gives the variable another one. So as
// long as the buffer whose number is known is held here and is still the variable's, the number is still right. (A
// variable that was freed leaves its buffer here; the one that takes its place in memory has another.) Callers hold the
// variable's lock.
class KnownNumbers {
 public:
  static KnownNumbers& Shared() {
    static auto* const numbers = new KnownNumbers;  // never destroyed: it may hold memory of a GPU
    return *numbers;
  }

  bool Find(const Var* variable, const Tensor& value, Number* number) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(variable);
    if (found == known_.end() || !IsSame(found->second.buffer, value)) return false;
    *number = found->second.number;
    return true;
  }

  void Keep(const Var* variable, const Tensor& value, const Number& number) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (known_.size() >= kMost) known_.clear();
    known_[variable] = {value, number};
  }

  // `value` is the number that was known, plus 1, unless it is still that.
  void Count(const Var* variable, const Tensor& value) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(variable);
    if (found == known_.end() || IsSame(found->second.buffer, value)) return;
    const int64_t next = found->second.number.integer + 1;
    found->second = {value, {static_cast<float>(next), next}};
  }

  void Forget(const Var* variable) {
    std::lock_guard<std::mutex> lock(mutex_);
    known_.erase(variable);
  }

 private:
  struct Known {
    Tensor buffer;
    Number number;
  };
  static constexpr size_t kMost = 1024;

  static bool IsSame(const Tensor& a, const Tensor& b) { return a.SharesBufferWith(b) && a.data() == b.data(); }

  std::mutex mutex_;
  std::unordered_map<const Var*, Known> known_;
};

class ReadNumberOp : public ::tensorflow::OpKernel {
 public:
  explicit ReadNumberOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES(ctx, Attribute<int>(ctx, "num_variables") == 1, errors::InvalidArgument("one variable at a time"));
  }

  void Compute(OpKernelContext* ctx) override {
    Number number;
    OP_REQUIRES_OK(ctx, Read(ctx, &number));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &output));
    if (output->dtype() == ::tensorflow::DT_INT64) {
      output->scalar<int64_t>()() = number.integer;
    } else {
      output->scalar<float>()() = number.value;
    }
  }

 private:
  absl::Status Read(OpKernelContext* ctx, Number* number) const {
    VariableLocks locks;
    TF_RETURN_IF_ERROR(locks.Lock(ctx, {"variables"}, VariableLocks::kShared));
    const Tensor& value = *locks.tensor(0);
    if (value.NumElements() != 1) {
      return errors::InvalidArgument("a number must be a scalar, not of shape ", value.shape().DebugString());
    }
    if (output_type(0) == ::tensorflow::DT_INT64 && value.dtype() != ::tensorflow::DT_INT64) {
      return errors::InvalidArgument("the number of a variable of ", ::tensorflow::DataTypeString(value.dtype()),
                                     " is no int64");
    }
    KnownNumbers& known = KnownNumbers::Shared();
    if (known.Find(locks.variable(0), value, number)) return absl::OkStatus();
    Tensor on_host = value;
    if (OnGpu(ctx)) {
      TF_RETURN_IF_ERROR(AllocateHost(ctx, value.dtype(), value.shape(), &on_host));
      TF_RETURN_IF_ERROR(CopyToHost(ctx, value.data(), &on_host));
    }
    TF_RETURN_IF_ERROR(ToNumber(on_host, number));
    // A variable in copy-on-read mode is written in place, and is fetched each time.
    if (!locks.is_copied_on_read(0)) known.Keep(locks.variable(0), value, *number);
    return absl::OkStatus();
  }
};

SOK_REGISTER_KERNELS("SokReadNumber", ReadNumberOp, .HostMemory("number"));

class CountStepOp : public ::tensorflow::OpKernel {
 public:
  explicit CountStepOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES(ctx, Attribute<int>(ctx, "num_variables") == 1, errors::InvalidArgument("one variable at a time"));
  }

  void Compute(OpKernelContext* ctx) override {
    VariableLocks locks;
    OP_REQUIRES_OK(ctx, locks.Lock(ctx, {"variables"}, VariableLocks::kShared));
    const Tensor& value = *locks.tensor(0);
    OP_REQUIRES(ctx, value.NumElements() == 1 && value.dtype() == ::tensorflow::DT_INT64,
                errors::InvalidArgument("a count of steps must be a scalar of int64"));
    if (locks.is_copied_on_read(0)) {
      KnownNumbers::Shared().Forget(locks.variable(0));
    } else {
      KnownNumbers::Shared().Count(locks.variable(0), value);
    }
  }
};

SOK_REGISTER_KERNELS("SokCountStep", CountStepOp);

}  // namespace

}  // namespace sok::tf
