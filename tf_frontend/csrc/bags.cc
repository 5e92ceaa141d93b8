// SPDX-License-Identifier: Apache-2.0
// bags: the coordinates of sparse tensors -> row splits, and the way back for gradients of weights.
#include <cstring>

#include "support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok::tf {

using ::tensorflow::OpInputList;
using ::tensorflow::OpOutputList;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("SokBags")
    .Input("indices: num_lookups * int64")
    .Input("dense_shapes: num_lookups * int64")
    .Input("keys: key_types")
    .Input("weights: num_weighted * float32")
    .Input("weight_indices: num_weighted * int64")
    .Output("row_splits: num_lookups * int64")
    .Output("sorted_keys: key_types")
    .Output("sorted_weights: num_weighted * float32")
    .Output("orders: num_weighted * int64")
    .Attr("num_lookups: int >= 1")
    .Attr("num_weighted: int >= 0")
    .Attr("key_types: list({int32, int64}) >= 1")
    .Attr("weighted: list(bool) >= 1")
    .Attr("names: list(string) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<ShapeHandle> keys, shapes, row_splits, weights, orders;
      TF_RETURN_IF_ERROR(c->input("keys", &keys));
      TF_RETURN_IF_ERROR(c->input("weights", &weights));
      TF_RETURN_IF_ERROR(c->set_output("sorted_keys", keys));
      if (!weights.empty()) {
        for (size_t i = 0; i < weights.size(); ++i) orders.push_back(c->Vector(c->UnknownDim()));
        TF_RETURN_IF_ERROR(c->set_output("sorted_weights", weights));
        TF_RETURN_IF_ERROR(c->set_output("orders", orders));
      }
      const int num_lookups = static_cast<int>(keys.size());
      for (int i = 0; i < num_lookups; ++i) {
        const Tensor* dense_shape = c->input_tensor(num_lookups + i);
        auto splits = c->UnknownDim();
        if (dense_shape != nullptr && dense_shape->NumElements() == 2) {
          splits = c->MakeDim(dense_shape->flat<int64_t>()(0) + 1);
        }
        row_splits.push_back(c->Vector(splits));
      }
      return c->set_output("row_splits", row_splits);
    })
    .Doc(
        "Row splits of sparse tensors, whose entries may come in any order.\n\n"
        "indices: [n, 2] coordinates of each sparse tensor.\n"
        "dense_shapes: [2] of each sparse tensor; its first number is how many bags there are.\n"
        "keys: [n] values of each sparse tensor.\n"
        "weights: [n] values of the weights of each tensor that `weighted` marks.\n"
        "weight_indices: [n, 2] coordinates of those weights; they must be those of the keys.\n"
        "row_splits: [bags + 1].\n"
        "sorted_keys: keys by bag; the input itself when it came so.\n"
        "sorted_weights: weights likewise.\n"
        "orders: [n] where each sorted weight came from, or [0] when they came sorted.\n"
        "weighted: whether each sparse tensor has weights.\n"
        "names: of the tables, for messages.\n");

class BagsOp : public ::tensorflow::OpKernel {
 public:
  explicit BagsOp(OpKernelConstruction* ctx)
      : OpKernel(ctx),
        weighted_(Attribute<std::vector<bool>>(ctx, "weighted")),
        names_(Attribute<std::vector<std::string>>(ctx, "names")) {
    const size_t count = Attribute<int>(ctx, "num_lookups");
    size_t num_weighted = 0;
    for (const bool weighted : weighted_) num_weighted += weighted;
    OP_REQUIRES(ctx,
                weighted_.size() == count && names_.size() == count &&
                    num_weighted == static_cast<size_t>(Attribute<int>(ctx, "num_weighted")) &&
                    Attribute<std::vector<::tensorflow::DataType>>(ctx, "key_types").size() == count,
                errors::InvalidArgument("the attributes of the bags do not fit together"));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList indices, shapes, keys, weights, weight_indices;
    OP_REQUIRES_OK(ctx, ctx->input_list("indices", &indices));
    OP_REQUIRES_OK(ctx, ctx->input_list("dense_shapes", &shapes));
    OP_REQUIRES_OK(ctx, ctx->input_list("keys", &keys));
    OP_REQUIRES_OK(ctx, ctx->input_list("weights", &weights));
    OP_REQUIRES_OK(ctx, ctx->input_list("weight_indices", &weight_indices));
    OpOutputList row_splits, sorted_keys, sorted_weights, orders;
    OP_REQUIRES_OK(ctx, ctx->output_list("row_splits", &row_splits));
    OP_REQUIRES_OK(ctx, ctx->output_list("sorted_keys", &sorted_keys));
    OP_REQUIRES_OK(ctx, ctx->output_list("sorted_weights", &sorted_weights));
    OP_REQUIRES_OK(ctx, ctx->output_list("orders", &orders));
    CoreContext core(ctx);
    for (int i = 0, next = 0; i < indices.size(); ++i) {
      const int w = weighted_[i] ? next++ : -1;
      const int64_t n = keys[i].NumElements();
      OP_REQUIRES(
          ctx,
          indices[i].dims() == 2 && indices[i].dim_size(1) == 2 && indices[i].dim_size(0) == n && keys[i].dims() == 1 &&
              shapes[i].NumElements() == 2 && shapes[i].flat<int64_t>()(0) >= 0,
          errors::InvalidArgument("lookup ", i, " (table '", names_[i], "'): the ids must be a sparse tensor of two ",
                                  "dimensions, not indices of the shape ", indices[i].shape().DebugString(),
                                  " with values of the shape ", keys[i].shape().DebugString(), " and a dense shape of ",
                                  shapes[i].NumElements(), " numbers"));
      if (w >= 0) OP_REQUIRES_OK(ctx, CheckWeights(i, keys[i], indices[i], weights[w], weight_indices[w]));

      const int64_t bags = shapes[i].flat<int64_t>()(0);
      Tensor* splits = nullptr;
      Tensor order, sorted;
      OP_REQUIRES_OK(ctx, row_splits.allocate(i, {bags + 1}, &splits));
      OP_REQUIRES_OK(ctx, ctx->allocate_temp(::tensorflow::DT_INT64, {n}, &order));
      OP_REQUIRES_OK(ctx, ctx->allocate_temp(::tensorflow::DT_INT32, {1}, &sorted));
      const int code =
          sok_bags_from_coordinates(core.get(), View(indices[i]), bags, View(*splits), View(order), View(sorted));
      OP_REQUIRES(ctx, code == SOK_OK,
                  ToStatus(code, absl::StrCat("lookup ", i, " (table '", names_[i], "'): ", sok_last_error_message())));
      const bool is_sorted = sorted.flat<int32_t>()(0) != 0;
      if (is_sorted) {
        sorted_keys.set(i, keys[i]);
      } else {
        OP_REQUIRES_OK(ctx, Sort(keys[i], order, i, &sorted_keys));
      }
      if (w < 0) continue;
      if (is_sorted) {
        sorted_weights.set(w, weights[w]);
        orders.set(w, order.Slice(0, 0));
      } else {
        OP_REQUIRES_OK(ctx, Sort(weights[w], order, w, &sorted_weights));
        orders.set(w, order);
      }
    }
  }

 private:
  absl::Status CheckWeights(int lookup, const Tensor& keys, const Tensor& indices, const Tensor& weights,
                            const Tensor& weight_indices) const {
    const std::string where = absl::StrCat("lookup ", lookup, " (table '", names_[lookup], "'): ");
    if (weights.shape() != keys.shape() || weight_indices.shape() != indices.shape()) {
      return errors::InvalidArgument(where, "there are ", keys.NumElements(), " ids and ", weights.NumElements(),
                                     " weights: sp_weights must have the indices of sp_ids");
    }
    if (weight_indices.data() != indices.data() && indices.TotalBytes() > 0 &&
        std::memcmp(weight_indices.data(), indices.data(), indices.TotalBytes()) != 0) {
      return errors::InvalidArgument(where, "sp_weights must have the indices of sp_ids, in the same order");
    }
    return absl::OkStatus();
  }

  static absl::Status Sort(const Tensor& input, const Tensor& order, int position, OpOutputList* outputs) {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(outputs->allocate(position, input.shape(), &output));
    const auto from = order.flat<int64_t>();
    if (input.dtype() == ::tensorflow::DT_INT64) {
      for (int64_t j = 0; j < from.size(); ++j) output->flat<int64_t>()(j) = input.flat<int64_t>()(from(j));
    } else if (input.dtype() == ::tensorflow::DT_INT32) {
      for (int64_t j = 0; j < from.size(); ++j) output->flat<int32_t>()(j) = input.flat<int32_t>()(from(j));
    } else {
      for (int64_t j = 0; j < from.size(); ++j) output->flat<float>()(j) = input.flat<float>()(from(j));
    }
    return absl::OkStatus();
  }

  std::vector<bool> weighted_;
  std::vector<std::string> names_;
};

REGISTER_OP("SokRestoreOrder")
    .Input("values: num_lists * float32")
    .Input("orders: num_lists * int64")
    .Output("restored: num_lists * float32")
    .Attr("num_lists: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<ShapeHandle> values;
      TF_RETURN_IF_ERROR(c->input("values", &values));
      return c->set_output("restored", values);
    })
    .Doc(
        "Puts values back where SokBags took them from; its gradient.\n\n"
        "values: [n] in sorted order.\n"
        "orders: [n] what SokBags gave, or [0] for values that are in place.\n"
        "restored: [n].\n");

class RestoreOrderOp : public ::tensorflow::OpKernel {
 public:
  explicit RestoreOrderOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    OpInputList values, orders;
    OpOutputList restored;
    OP_REQUIRES_OK(ctx, ctx->input_list("values", &values));
    OP_REQUIRES_OK(ctx, ctx->input_list("orders", &orders));
    OP_REQUIRES_OK(ctx, ctx->output_list("restored", &restored));
    for (int i = 0; i < values.size(); ++i) {
      if (orders[i].NumElements() == 0) {
        restored.set(i, values[i]);
        continue;
      }
      OP_REQUIRES(ctx, orders[i].NumElements() == values[i].NumElements(),
                  errors::InvalidArgument("an order of ", orders[i].NumElements(), " for ", values[i].NumElements(),
                                          " values"));
      Tensor* output = nullptr;
      OP_REQUIRES_OK(ctx, restored.allocate(i, values[i].shape(), &output));
      const auto to = orders[i].flat<int64_t>();
      for (int64_t j = 0; j < to.size(); ++j) output->flat<float>()(to(j)) = values[i].flat<float>()(j);
    }
  }
};

REGISTER_KERNEL_BUILDER(Name("SokBags").Device(::tensorflow::DEVICE_CPU), BagsOp);
REGISTER_KERNEL_BUILDER(Name("SokRestoreOrder").Device(::tensorflow::DEVICE_CPU), RestoreOrderOp);

}  // namespace sok::tf
