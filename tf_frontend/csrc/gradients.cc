// SPDX-License-Identifier: Apache-2.0
#include "gradients.h"

#include "counts.h"

namespace sok::tf {
namespace {

using ::tensorflow::OpInputList;

}  // namespace

GradientAttributes::GradientAttributes(OpKernelConstruction* ctx, int num_tables)
    : num_tables_(num_tables),
      part_tables_(Attribute<std::vector<int64_t>>(ctx, "part_tables")),
      part_combiners_(Attribute<std::vector<int64_t>>(ctx, "part_combiners")),
      part_weighted_(Attribute<std::vector<bool>>(ctx, "part_weighted")),
      part_unique_(Attribute<std::vector<bool>>(ctx, "part_unique")),
      group_sizes_(Attribute<std::vector<int64_t>>(ctx, "group_sizes")),
      column_tables_(Attribute<std::vector<int64_t>>(ctx, "column_tables")),
      column_dimensions_(Attribute<std::vector<int64_t>>(ctx, "column_dimensions")) {
  const size_t parts = Attribute<int>(ctx, "num_parts");
  size_t num_weighted = 0, columns = 0;
  for (const bool weighted : part_weighted_) num_weighted += weighted;
  for (const int64_t size : group_sizes_) columns += size;
  OP_REQUIRES(ctx,
              part_tables_.size() == parts && part_combiners_.size() == parts && part_weighted_.size() == parts &&
                  part_unique_.size() == parts &&
                  num_weighted == static_cast<size_t>(Attribute<int>(ctx, "num_weighted")) &&
                  Attribute<std::vector<::tensorflow::DataType>>(ctx, "slot_types").size() == parts &&
                  group_sizes_.size() == static_cast<size_t>(Attribute<int>(ctx, "num_groups")) &&
                  column_tables_.size() == columns && column_dimensions_.size() == columns,
              errors::InvalidArgument("the attributes of the gradients do not fit together"));
  for (const auto* tables : {&part_tables_, &column_tables_}) {
    for (const int64_t table : *tables) {
      OP_REQUIRES(ctx, (tables == &part_tables_ ? 0 : -1) <= table && table < num_tables,
                  errors::InvalidArgument("a gradient names table ", table, " of ", num_tables));
    }
  }
}

absl::Status GradientAttributes::Read(OpKernelContext* ctx, std::vector<std::vector<sok_gradient>>* gradients) const {
  gradients->assign(num_tables_, {});
  TF_RETURN_IF_ERROR(ReadParts(ctx, gradients));
  return ReadExchanges(ctx, gradients);
}

absl::Status GradientAttributes::ReadParts(OpKernelContext* ctx,
                                           std::vector<std::vector<sok_gradient>>* gradients) const {
  OpInputList slots, values, row_splits, weights;
  TF_RETURN_IF_ERROR(ctx->input_list("slots", &slots));
  TF_RETURN_IF_ERROR(ctx->input_list("values", &values));
  TF_RETURN_IF_ERROR(ctx->input_list("row_splits", &row_splits));
  TF_RETURN_IF_ERROR(ctx->input_list("weights", &weights));
  int next_weights = 0;
  for (size_t i = 0; i < part_tables_.size(); ++i) {
    const int part = static_cast<int>(i);
    if (slots[part].dims() != 1 || values[part].dims() != 2 || row_splits[part].dims() != 1) {
      return errors::InvalidArgument("gradient ", i, ": slots, values and row splits of the shapes ",
                                     slots[part].shape().DebugString(), ", ", values[part].shape().DebugString(), ", ",
                                     row_splits[part].shape().DebugString());
    }
    sok_gradient gradient = SOK_GRADIENT_INIT;
    gradient.combiner = static_cast<int32_t>(part_combiners_[i]);
    gradient.flags = part_unique_[i] ? SOK_GRADIENT_UNIQUE : 0u;
    gradient.slots = View(slots[part]);
    gradient.values = View(values[part]);
    if (row_splits[part].NumElements() > 0) gradient.row_splits = View(row_splits[part]);
    if (part_weighted_[i]) gradient.weights = View(weights[next_weights++]);
    (*gradients)[part_tables_[i]].push_back(gradient);
  }
  return absl::OkStatus();
}

absl::Status GradientAttributes::ReadExchanges(OpKernelContext* ctx,
                                               std::vector<std::vector<sok_gradient>>* gradients) const {
  OpInputList slots, values, counts;
  TF_RETURN_IF_ERROR(ctx->input_list("exchanged_slots", &slots));
  TF_RETURN_IF_ERROR(ctx->input_list("exchanged_values", &values));
  TF_RETURN_IF_ERROR(ctx->input_list("exchanged_counts", &counts));
  size_t first_column = 0;
  for (size_t i = 0; i < group_sizes_.size(); ++i) {
    const int group = static_cast<int>(i);
    const size_t size = group_sizes_[i];
    const std::vector<int64_t> dimensions(column_dimensions_.begin() + first_column,
                                          column_dimensions_.begin() + first_column + size);
    TF_RETURN_IF_ERROR(CheckCounts(counts[group], size));
    if (slots[group].NumElements() != NumKeys(counts[group]) ||
        values[group].NumElements() != NumElements(counts[group], dimensions)) {
      return errors::InvalidArgument("exchange ", i, ": the counts want ", NumKeys(counts[group]), " slots and ",
                                     NumElements(counts[group], dimensions), " values, there are ",
                                     slots[group].NumElements(), " and ", values[group].NumElements());
    }
    auto* slot = static_cast<int64_t*>(slots[group].data());
    auto* value = static_cast<float*>(values[group].data());
    const auto count = counts[group].matrix<int64_t>();
    for (int64_t source = 0; source < counts[group].dim_size(0); ++source) {
      for (size_t column = 0; column < size; ++column) {
        const int64_t rows = count(source, column);
        const int64_t table = column_tables_[first_column + column];
        if (rows > 0 && table >= 0) {
          sok_gradient gradient = SOK_GRADIENT_INIT;
          gradient.flags = SOK_GRADIENT_UNIQUE;  // route removed the duplicates
          gradient.slots = {slot, SOK_INT64, 1, {rows, 1}};
          gradient.values = {value, SOK_FLOAT32, 2, {rows, dimensions[column]}};
          (*gradients)[table].push_back(gradient);
        }
        slot += rows;
        value += rows * dimensions[column];
      }
    }
    first_column += size;
  }
  return absl::OkStatus();
}

}  // namespace sok::tf
