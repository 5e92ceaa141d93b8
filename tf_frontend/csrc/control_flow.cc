// SPDX-License-Identifier: Apache-2.0
// control_flow: the way of a gradient out of a branch or a loop as the rows that it names (../control_flow.py).
#include <string>
#include <utility>
#include <vector>

#include "gpu.h"
#include "tables.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/variant_encode_decode.h"
#include "tensorflow/core/framework/variant_op_registry.h"

namespace sok::tf {
namespace {

using ::tensorflow::TypeIndex;  // for the macros below

// (slots [n] int64, values [n, dimension] float32) of each lookup: the gradient is the sum of them all. To TensorFlow a
// number that has a zero and a sum, as it wants of whatever has a gradient.
struct Rows {
  std::vector<std::pair<Tensor, Tensor>> summands;

  std::string TypeName() const { return "sok::tf::Rows"; }
  std::string DebugString() const { return absl::StrCat("rows of ", summands.size(), " lookups"); }
  void Encode(::tensorflow::VariantTensorData* data) const {
    for (const auto& [slots, values] : summands) {
      *data->add_tensors() = slots;
      *data->add_tensors() = values;
    }
  }
  bool Decode(const ::tensorflow::VariantTensorData& data) {
    for (int i = 0; i + 1 < data.tensors_size(); i += 2) summands.emplace_back(data.tensors(i), data.tensors(i + 1));
    return data.tensors_size() % 2 == 0;
  }
};

absl::Status Zero(OpKernelContext*, const Rows&, Rows*) { return absl::OkStatus(); }

absl::Status Add(OpKernelContext*, const Rows& a, const Rows& b, Rows* sum) {
  sum->summands = a.summands;
  sum->summands.insert(sum->summands.end(), b.summands.begin(), b.summands.end());
  return absl::OkStatus();
}

REGISTER_UNARY_VARIANT_DECODE_FUNCTION(Rows, "sok::tf::Rows");
REGISTER_UNARY_VARIANT_UNARY_OP_FUNCTION(::tensorflow::ZEROS_LIKE_VARIANT_UNARY_OP, ::tensorflow::DEVICE_CPU, Rows,
                                         Zero);
REGISTER_UNARY_VARIANT_BINARY_OP_FUNCTION(::tensorflow::ADD_VARIANT_BINARY_OP, ::tensorflow::DEVICE_CPU, Rows, Add);
#if defined(SOK_WITH_CUDA)
REGISTER_UNARY_VARIANT_UNARY_OP_FUNCTION(::tensorflow::ZEROS_LIKE_VARIANT_UNARY_OP, ::tensorflow::DEVICE_GPU, Rows,
                                         Zero);
REGISTER_UNARY_VARIANT_BINARY_OP_FUNCTION(::tensorflow::ADD_VARIANT_BINARY_OP, ::tensorflow::DEVICE_GPU, Rows, Add);
#endif

absl::Status Give(OpKernelContext* ctx, const char* name, Rows rows) {
  ::tensorflow::AllocatorAttributes host;
  host.set_on_host(true);
  Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(ctx->allocate_output(name, {}, &output, host));
  output->scalar<::tensorflow::Variant>()() = std::move(rows);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("SokOutside")
    .Input("tables: num_tables * resource")
    .Output("outside: resource")
    .Output("rows: variant")
    .SOK_TABLE_ATTRIBUTES
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      for (int i = 0; i < 2; ++i) c->set_output(i, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(
        "A table for the lookups in a branch or a loop, made outside of it.\n\n"
        "tables: the table.\n"
        "outside: the table, of which TensorFlow knows no shape and so makes no zeros.\n"
        "rows: none; stands for the table where gradients are concerned.\n" SOK_TABLE_ATTRIBUTES_DOC);

class OutsideOp : public ::tensorflow::OpKernel {
 public:
  explicit OutsideOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}
  void Compute(OpKernelContext* ctx) override {
    ctx->set_output(0, ctx->input(0));
    OP_REQUIRES_OK(ctx, Give(ctx, "rows", {}));
  }
};

REGISTER_OP("SokInside")
    .Input("outside: resource")
    .Input("rows: variant")
    .Output("inside: resource")
    .SetShapeFn(::tensorflow::shape_inference::ScalarShape)
    .Doc(
        "The table, whose gradient becomes that of `rows`.\n\n"
        "outside, rows: what SokOutside gave.\n"
        "inside: the table.\n");

class InsideOp : public ::tensorflow::OpKernel {
 public:
  explicit InsideOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}
  void Compute(OpKernelContext* ctx) override { ctx->set_output(0, ctx->input(0)); }
};

REGISTER_OP("SokPackRows")
    .Input("slots: int64")
    .Input("values: float32")
    .Output("rows: variant")
    .SetShapeFn(::tensorflow::shape_inference::ScalarShape)
    .Doc(
        "A gradient as one number.\n\n"
        "slots: [n] rows.\n"
        "values: [n, dimension] their gradients.\n"
        "rows: both.\n");

class PackRowsOp : public ::tensorflow::OpKernel {
 public:
  explicit PackRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}
  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, Give(ctx, "rows", {{{ctx->input(0), ctx->input(1)}}}));
  }
};

REGISTER_OP("SokUnpackRows")
    .Input("rows: variant")
    .Output("slots: int64")
    .Output("values: float32")
    .Attr("dimension: int >= 1")
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext* c) {
      int64_t dimension = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("dimension", &dimension));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Matrix(c->UnknownDim(), dimension));
      return absl::OkStatus();
    })
    .Doc(
        "The gradients that are in a sum of what SokPackRows gave, one after the other.\n\n"
        "rows: the sum.\n"
        "slots: [n] rows; the same one may occur several times.\n"
        "values: [n, dimension] their gradients.\n"
        "dimension: elements a row.\n");

class UnpackRowsOp : public ::tensorflow::OpKernel {
 public:
  explicit UnpackRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx), dimension_(Attribute<int64_t>(ctx, "dimension")) {}

  void Compute(OpKernelContext* ctx) override {
    const Rows* rows = ctx->input(0).scalar<::tensorflow::Variant>()().get<Rows>();
    OP_REQUIRES(ctx, rows != nullptr, errors::InvalidArgument("the gradient is not one of SokPackRows"));
    int64_t n = 0;
    for (const auto& [slots, values] : rows->summands) {
      OP_REQUIRES(ctx,
                  values.dims() == 2 && values.dim_size(1) == dimension_ && values.dim_size(0) == slots.NumElements(),
                  errors::InvalidArgument("gradients of the shape ", values.shape().DebugString(), " of ",
                                          slots.NumElements(), " rows of ", dimension_, " elements"));
      n += slots.NumElements();
    }
    Tensor *all_slots = nullptr, *all_values = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {n}, &all_slots));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, {n, dimension_}, &all_values));
    int64_t first = 0;
    for (const auto& [slots, values] : rows->summands) {
      const int64_t end = first + slots.NumElements();
      Tensor to_slots = all_slots->Slice(first, end), to_values = all_values->Slice(first, end);
      OP_REQUIRES_OK(ctx, CopyOnDevice(ctx, slots, &to_slots));
      OP_REQUIRES_OK(ctx, CopyOnDevice(ctx, values, &to_values));
      first = end;
    }
  }

 private:
  int64_t dimension_;
};

SOK_REGISTER_KERNELS("SokOutside", OutsideOp);
SOK_REGISTER_KERNELS("SokInside", InsideOp);
SOK_REGISTER_KERNELS("SokPackRows", PackRowsOp);
SOK_REGISTER_KERNELS("SokUnpackRows", UnpackRowsOp);

}  // namespace sok::tf
