// SPDX-License-Identifier: Apache-2.0
// SokBags: the coordinates of sparse tensors -> row splits, and the way back for gradients of weights.
#include <cstring>
#include <limits>

#include "support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok::tf {

using ::tensorflow::OpInputList;
using ::tensorflow::OpOutputList;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

// Whether a sparse tensor may say that it has so many rows: one more of them, the row splits, are counted in int64 too.
static bool IsBatch(int64_t rows) { return rows >= 0 && rows < std::numeric_limits<int64_t>::max(); }

REGISTER_OP("SokBags")
    .Input("indices: num_lookups * int64")
    .Input("dense_shapes: num_lookups * int64")
    .Input("keys: key_types")
    .Input("weights: num_weighted * float32")
    .Input("weight_indices: num_weighted * int64")
    .Input("ragged_splits: num_ragged * int64")
    .Input("ragged_weight_splits: num_ragged * int64")
    .Output("row_splits: num_lookups * int64")
    .Output("sorted_keys: key_types")
    .Output("sorted_weights: num_weighted * float32")
    .Output("orders: num_weighted * int64")
    .Output("checked_splits: num_ragged * int64")
    .Output("message: string")
    .Attr("num_lookups: int >= 0")
    .Attr("num_weighted: int >= 0")
    .Attr("num_ragged: int >= 0")
    .Attr("key_types: list({int32, int64}) >= 0")
    .Attr("weighted: list(bool) >= 0")
    .Attr("names: list(string) >= 0")
    .Attr("ragged_names: list(string) >= 0")
    .Attr("defer_errors: bool")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<ShapeHandle> keys, shapes, row_splits, weights, orders;
      TF_RETURN_IF_ERROR(c->input("keys", &keys));
      TF_RETURN_IF_ERROR(c->input("weights", &weights));
      TF_RETURN_IF_ERROR(c->set_output("message", {c->Scalar()}));
      std::vector<ShapeHandle> ragged;
      TF_RETURN_IF_ERROR(c->input("ragged_splits", &ragged));
      if (!ragged.empty()) TF_RETURN_IF_ERROR(c->set_output("checked_splits", ragged));
      if (keys.empty()) return absl::OkStatus();
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
          const int64_t bags = dense_shape->flat<int64_t>()(0);
          if (IsBatch(bags)) splits = c->MakeDim(bags + 1);
        }
        row_splits.push_back(c->Vector(splits));
      }
      return c->set_output("row_splits", row_splits);
    })
    .Doc(
        "Row splits of sparse tensors, whose entries may come in any order, and a check that weights lie as ids do.\n\n"
        "indices: [n, 2] coordinates of each sparse tensor.\n"
        "dense_shapes: [2] of each sparse tensor; its first number is how many bags there are.\n"
        "keys: [n] values of each sparse tensor.\n"
        "weights: [n] values of the weights of each tensor that `weighted` marks.\n"
        "weight_indices: [n, 2] coordinates of those weights; they must be those of the keys.\n"
        "ragged_splits: [bags + 1] of the ids of ragged tensors with weights.\n"
        "ragged_weight_splits: [bags + 1] of those weights; they must be equal.\n"
        "row_splits: [bags + 1].\n"
        "sorted_keys: keys by bag; the input itself when it came so.\n"
        "sorted_weights: weights likewise.\n"
        "orders: [n] where each sorted weight came from, or [0] when they came sorted.\n"
        "checked_splits: ragged_splits, after the check.\n"
        "message: why a batch cannot be looked up, or empty.\n"
        "weighted: whether each sparse tensor has weights.\n"
        "names: of the lookups, for messages.\n"
        "ragged_names: of the lookups of the ragged tensors, for messages.\n"
        "defer_errors: a bad batch does not fail here but gives a message and empty bags, which SokRoute takes.\n");

class BagsOp : public ::tensorflow::OpKernel {
 public:
  explicit BagsOp(OpKernelConstruction* ctx)
      : OpKernel(ctx),
        weighted_(Attribute<std::vector<bool>>(ctx, "weighted")),
        names_(Attribute<std::vector<std::string>>(ctx, "names")),
        ragged_names_(Attribute<std::vector<std::string>>(ctx, "ragged_names")),
        defer_errors_(Attribute<bool>(ctx, "defer_errors")) {
    const size_t count = Attribute<int>(ctx, "num_lookups");
    size_t num_weighted = 0;
    for (const bool weighted : weighted_) num_weighted += weighted;
    OP_REQUIRES(ctx,
                weighted_.size() == count && names_.size() == count &&
                    ragged_names_.size() == static_cast<size_t>(Attribute<int>(ctx, "num_ragged")) &&
                    num_weighted == static_cast<size_t>(Attribute<int>(ctx, "num_weighted")) &&
                    Attribute<std::vector<::tensorflow::DataType>>(ctx, "key_types").size() == count,
                errors::InvalidArgument("the attributes of the bags do not fit together"));
  }

  void Compute(OpKernelContext* ctx) override {
    Tensor* message = nullptr;
    OpOutputList list;
    OP_REQUIRES_OK(ctx, ctx->output_list("message", &list));
    OP_REQUIRES_OK(ctx, list.allocate(0, {}, &message));
    Lists lists;
    OP_REQUIRES_OK(ctx, lists.Read(ctx));
    const absl::Status status = Convert(ctx, &lists);
    if (absl::IsInvalidArgument(status) && defer_errors_) {
      OP_REQUIRES_OK(ctx, lists.Clear(ctx));
      message->scalar<::tensorflow::tstring>()() = std::string(status.message());
    } else {
      OP_REQUIRES_OK(ctx, status);
    }
    OP_REQUIRES_OK(ctx, lists.Write(ctx));
  }

 private:
  struct Lists {
    OpInputList indices, shapes, keys, weights, weight_indices, ragged_splits, ragged_weight_splits;
    // The outputs; set once, at the end.
    std::vector<Tensor> row_splits, sorted_keys, sorted_weights, orders;

    absl::Status Read(OpKernelContext* ctx) {
      TF_RETURN_IF_ERROR(ctx->input_list("indices", &indices));
      TF_RETURN_IF_ERROR(ctx->input_list("dense_shapes", &shapes));
      TF_RETURN_IF_ERROR(ctx->input_list("keys", &keys));
      TF_RETURN_IF_ERROR(ctx->input_list("weights", &weights));
      TF_RETURN_IF_ERROR(ctx->input_list("weight_indices", &weight_indices));
      TF_RETURN_IF_ERROR(ctx->input_list("ragged_splits", &ragged_splits));
      TF_RETURN_IF_ERROR(ctx->input_list("ragged_weight_splits", &ragged_weight_splits));
      row_splits.resize(keys.size());
      sorted_keys.resize(keys.size());
      sorted_weights.resize(weights.size());
      orders.resize(weights.size());
      return absl::OkStatus();
    }

    absl::Status Write(OpKernelContext* ctx) const {
      OpOutputList checked;
      TF_RETURN_IF_ERROR(ctx->output_list("checked_splits", &checked));
      for (int i = 0; i < ragged_splits.size(); ++i) checked.set(i, ragged_splits[i]);
      const std::pair<const char*, const std::vector<Tensor>*> outputs[] = {{"row_splits", &row_splits},
                                                                            {"sorted_keys", &sorted_keys},
                                                                            {"sorted_weights", &sorted_weights},
                                                                            {"orders", &orders}};
      for (const auto& [name, tensors] : outputs) {
        OpOutputList list;
        TF_RETURN_IF_ERROR(ctx->output_list(name, &list));
        for (size_t i = 0; i < tensors->size(); ++i) list.set(static_cast<int>(i), (*tensors)[i]);
      }
      return absl::OkStatus();
    }

    // Makes every output that of a batch with no bags.
    absl::Status Clear(OpKernelContext* ctx) {
      for (int i = 0; i < keys.size(); ++i) {
        Tensor splits;
        TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_INT64, {1}, &splits));
        splits.flat<int64_t>()(0) = 0;
        row_splits[i] = splits;
        sorted_keys[i] = Tensor(keys[i].dtype(), {0});
      }
      for (int i = 0; i < weights.size(); ++i) {
        sorted_weights[i] = Tensor(::tensorflow::DT_FLOAT, {0});
        orders[i] = Tensor(::tensorflow::DT_INT64, {0});
      }
      return absl::OkStatus();
    }
  };

  absl::Status Convert(OpKernelContext* ctx, Lists* lists) const {
    for (int i = 0; i < lists->ragged_splits.size(); ++i) {
      const Tensor& ids = lists->ragged_splits[i];
      const Tensor& weights = lists->ragged_weight_splits[i];
      if (weights.shape() != ids.shape() || std::memcmp(weights.data(), ids.data(), ids.TotalBytes()) != 0) {
        return errors::InvalidArgument(ragged_names_[i], ": sp_weights must have the row splits of sp_ids");
      }
    }
    CoreContext core(ctx);
    for (int i = 0, next = 0; i < lists->indices.size(); ++i) {
      TF_RETURN_IF_ERROR(ConvertOne(ctx, core, i, weighted_[i] ? next++ : -1, lists));
    }
    return absl::OkStatus();
  }

  // Lookup i, whose weights are the w-th, or -1.
  absl::Status ConvertOne(OpKernelContext* ctx, const CoreContext& core, int i, int w, Lists* lists) const {
    const Tensor& indices = lists->indices[i];
    const Tensor& shape = lists->shapes[i];
    const Tensor& keys = lists->keys[i];
    const int64_t n = keys.NumElements();
    if (indices.dims() != 2 || indices.dim_size(1) != 2 || indices.dim_size(0) != n || keys.dims() != 1 ||
        shape.NumElements() != 2 || !IsBatch(shape.flat<int64_t>()(0))) {
      return errors::InvalidArgument(
          names_[i], ": the ids must be a sparse tensor of two dimensions, not indices of the ", "shape ",
          indices.shape().DebugString(), " with values of the shape ", keys.shape().DebugString(),
          " and a dense shape of ", shape.NumElements(), " numbers");
    }
    if (w >= 0) TF_RETURN_IF_ERROR(CheckWeights(i, keys, indices, lists->weights[w], lists->weight_indices[w]));

    const int64_t bags = shape.flat<int64_t>()(0);
    Tensor splits, order, sorted;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_INT64, {bags + 1}, &splits));
    TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_INT64, {n}, &order));
    TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_INT32, {1}, &sorted));
    const int code =
        sok_bags_from_coordinates(core.get(), View(indices), bags, View(splits), View(order), View(sorted));
    if (code != SOK_OK) return ToStatus(code, absl::StrCat(names_[i], ": ", sok_last_error_message()));
    lists->row_splits[i] = splits;
    const bool is_sorted = sorted.flat<int32_t>()(0) != 0;
    lists->sorted_keys[i] = keys;
    if (!is_sorted) TF_RETURN_IF_ERROR(Sort(ctx, keys, order, &lists->sorted_keys[i]));
    if (w < 0) return absl::OkStatus();
    lists->sorted_weights[w] = lists->weights[w];
    if (!is_sorted) TF_RETURN_IF_ERROR(Sort(ctx, lists->weights[w], order, &lists->sorted_weights[w]));
    lists->orders[w] = is_sorted ? order.Slice(0, 0) : order;
    return absl::OkStatus();
  }

  absl::Status CheckWeights(int lookup, const Tensor& keys, const Tensor& indices, const Tensor& weights,
                            const Tensor& weight_indices) const {
    const std::string where = names_[lookup] + ": ";
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

  static absl::Status Sort(OpKernelContext* ctx, const Tensor& input, const Tensor& order, Tensor* output) {
    TF_RETURN_IF_ERROR(ctx->allocate_temp(input.dtype(), input.shape(), output));
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
  std::vector<std::string> ragged_names_;
  bool defer_errors_;
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
