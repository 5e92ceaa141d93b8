// SPDX-License-Identifier: Apache-2.0
#include "gradients.h"

#include <algorithm>
#include <cstdint>

#include "lookups.h"
#include "messages.h"

namespace sok::tf {
namespace {

using ::tensorflow::OpInputList;

// That of slots of which nobody knows when they were located.
constexpr int64_t kNow = INT64_MAX;

absl::Status ReadGenerations(OpKernelContext* ctx, std::vector<int64_t>* generations) {
  OpInputList inputs;
  TF_RETURN_IF_ERROR(ctx->input_list("generations", &inputs));
  for (int i = 0; i < inputs.size(); ++i) {
    const auto numbers = inputs[i].flat<int64_t>();
    generations->insert(generations->end(), numbers.data(), numbers.data() + numbers.size());
  }
  return absl::OkStatus();
}

// The generation of entry i of a list of places among `generations`.
absl::Status GenerationAt(const std::vector<int64_t>& places, size_t i, const std::vector<int64_t>& generations,
                          int64_t* generation) {
  *generation = kNow;
  if (places.empty() || places[i] < 0) return absl::OkStatus();
  if (places[i] >= static_cast<int64_t>(generations.size())) {
    return errors::InvalidArgument("a gradient names generation ", places[i], " of ", generations.size());
  }
  *generation = generations[places[i]];
  return absl::OkStatus();
}

}  // namespace

GradientAttributes::GradientAttributes(OpKernelConstruction* ctx, const std::vector<int64_t>& dimensions)
    : dimensions_(dimensions),
      summand_tables_(Attribute<std::vector<int64_t>>(ctx, "summand_tables")),
      summand_values_(Attribute<std::vector<int64_t>>(ctx, "summand_values")),
      summand_columns_(Attribute<std::vector<int64_t>>(ctx, "summand_columns")),
      summand_combiners_(Attribute<std::vector<int64_t>>(ctx, "summand_combiners")),
      summand_weighted_(Attribute<std::vector<bool>>(ctx, "summand_weighted")),
      summand_unique_(Attribute<std::vector<bool>>(ctx, "summand_unique")),
      group_sizes_(Attribute<std::vector<int64_t>>(ctx, "group_sizes")),
      column_tables_(Attribute<std::vector<int64_t>>(ctx, "column_tables")),
      column_dimensions_(Attribute<std::vector<int64_t>>(ctx, "column_dimensions")),
      group_lookups_(Attribute<std::vector<int64_t>>(ctx, "group_lookups")),
      lookup_columns_(Attribute<std::vector<int64_t>>(ctx, "lookup_columns")),
      summand_members_(Attribute<std::vector<int64_t>>(ctx, "summand_members")),
      summand_generations_(Attribute<std::vector<int64_t>>(ctx, "summand_generations")),
      column_generations_(Attribute<std::vector<int64_t>>(ctx, "column_generations")) {
  const size_t summands = Attribute<int>(ctx, "num_summands");
  const int num_values = Attribute<int>(ctx, "num_values"), num_tables = static_cast<int>(dimensions.size());
  size_t num_weighted = 0, columns = 0, lookups = 0;
  for (const bool weighted : summand_weighted_) num_weighted += weighted;
  for (const int64_t size : group_sizes_) columns += size;
  for (const int64_t size : group_lookups_) lookups += size;
  OP_REQUIRES(ctx,
              summand_tables_.size() == summands && summand_combiners_.size() == summands &&
                  summand_weighted_.size() == summands && summand_unique_.size() == summands &&
                  summand_values_.size() == summands && summand_columns_.size() == summands &&
                  num_weighted == static_cast<size_t>(Attribute<int>(ctx, "num_weighted")) &&
                  Attribute<std::vector<::tensorflow::DataType>>(ctx, "slot_types").size() == summands &&
                  group_sizes_.size() == static_cast<size_t>(Attribute<int>(ctx, "num_groups")) &&
                  column_tables_.size() == columns && column_dimensions_.size() == columns &&
                  group_lookups_.size() == group_sizes_.size() && lookup_columns_.size() == lookups &&
                  (summand_members_.empty() || summand_members_.size() == summands) &&
                  (summand_generations_.empty() || summand_generations_.size() == summands) &&
                  (column_generations_.empty() || column_generations_.size() == columns),
              errors::InvalidArgument("the attributes of the gradients do not fit together"));
  for (const auto* tables : {&summand_tables_, &column_tables_}) {
    for (const int64_t table : *tables) {
      OP_REQUIRES(ctx, (tables == &summand_tables_ ? 0 : -1) <= table && table < num_tables,
                  errors::InvalidArgument("a gradient names table ", table, " of ", num_tables));
    }
  }
  for (const int64_t values : summand_values_) {
    OP_REQUIRES(ctx, 0 <= values && values < num_values,
                errors::InvalidArgument("a summand names values ", values, " of ", num_values));
  }
  auto column = lookup_columns_.begin();
  for (size_t group = 0; group < group_sizes_.size(); ++group) {
    for (int64_t i = 0; i < group_lookups_[group]; ++i, ++column) {
      OP_REQUIRES(ctx, 0 <= *column && *column < group_sizes_[group],
                  errors::InvalidArgument("a lookup of exchange ", group, " names table ", *column, " of ",
                                          group_sizes_[group]));
    }
  }
}

absl::Status GradientAttributes::Read(OpKernelContext* ctx, std::vector<std::vector<sok_gradient>>* gradients) const {
  gradients->assign(dimensions_.size(), {});
  std::vector<int64_t> generations;
  TF_RETURN_IF_ERROR(ReadGenerations(ctx, &generations));
  TF_RETURN_IF_ERROR(ReadSummands(ctx, generations, gradients));
  return ReadExchanges(ctx, generations, gradients);
}

absl::Status GradientAttributes::ReadSummands(OpKernelContext* ctx, const std::vector<int64_t>& generations,
                                              std::vector<std::vector<sok_gradient>>* gradients) const {
  OpInputList slots, values, row_splits, weights;
  TF_RETURN_IF_ERROR(ctx->input_list("slots", &slots));
  TF_RETURN_IF_ERROR(ctx->input_list("values", &values));
  TF_RETURN_IF_ERROR(ctx->input_list("row_splits", &row_splits));
  TF_RETURN_IF_ERROR(ctx->input_list("weights", &weights));
  int next_weights = 0;
  for (size_t i = 0; i < summand_tables_.size(); ++i) {
    const int summand = static_cast<int>(i);
    const Tensor& of_summand = values[static_cast<int>(summand_values_[i])];
    const int64_t members = summand_members_.empty() ? 0 : summand_members_[i];
    const int64_t column = summand_columns_[i];
    const int64_t width = dimensions_[summand_tables_[i]] * std::max<int64_t>(1, members);
    if (slots[summand].dims() != 1 || of_summand.dims() != 2 || row_splits[summand].dims() != 1) {
      return errors::InvalidArgument("gradient ", i, ": slots, values and row splits of the shapes ",
                                     slots[summand].shape().DebugString(), ", ", of_summand.shape().DebugString(), ", ",
                                     row_splits[summand].shape().DebugString());
    }
    if (column > of_summand.dim_size(1) || (column >= 0 && width > of_summand.dim_size(1) - column)) {
      return errors::InvalidArgument("gradient ", i, ": columns [", column, ", ", column + width,
                                     ") of values of the shape ", of_summand.shape().DebugString());
    }
    sok_gradient gradient = SOK_GRADIENT_INIT;
    gradient.combiner = static_cast<int32_t>(summand_combiners_[i]);
    gradient.flags = summand_unique_[i] ? SOK_GRADIENT_UNIQUE : 0u;
    gradient.slots = View(slots[summand]);
    gradient.values = column < 0 ? View(of_summand) : Columns(of_summand, column, width);
    gradient.num_members = static_cast<int32_t>(members);
    if (row_splits[summand].NumElements() > 0) gradient.row_splits = View(row_splits[summand]);
    if (summand_weighted_[i]) gradient.weights = View(weights[next_weights++]);
    TF_RETURN_IF_ERROR(GenerationAt(summand_generations_, i, generations, &gradient.generation));
    (*gradients)[summand_tables_[i]].push_back(gradient);
  }
  return absl::OkStatus();
}

absl::Status GradientAttributes::ReadExchanges(OpKernelContext* ctx, const std::vector<int64_t>& generations,
                                               std::vector<std::vector<sok_gradient>>* gradients) const {
  OpInputList slots, values, splits, counts;
  TF_RETURN_IF_ERROR(ctx->input_list("exchanged_slots", &slots));
  TF_RETURN_IF_ERROR(ctx->input_list("exchanged_values", &values));
  TF_RETURN_IF_ERROR(ctx->input_list("exchanged_splits", &splits));
  TF_RETURN_IF_ERROR(ctx->input_list("exchanged_counts", &counts));
  auto table = column_tables_.begin();
  auto dimension = column_dimensions_.begin();
  auto lookup = lookup_columns_.begin();
  for (size_t i = 0; i < group_sizes_.size(); ++i) {
    const int group = static_cast<int>(i);
    const std::vector<int64_t> tables(table, table + group_sizes_[i]);
    const std::vector<int64_t> dimensions(dimension, dimension + group_sizes_[i]);
    const std::vector<int64_t> lookup_tables(lookup, lookup + group_lookups_[i]);
    Messages messages;
    TF_RETURN_IF_ERROR(messages.Read(counts[group], dimensions, lookup_tables));
    std::vector<sok_gradient> came(messages->num_parts);
    std::vector<int64_t> first(tables.size() + 1);
    TF_RETURN_IF_ERROR(
        ToStatus(sok_owner_gradients(messages.get(), messages.SplitsIn(splits[group]), View(slots[group]),
                                     View(values[group]), came.data(), first.data())));
    const size_t first_column = table - column_tables_.begin();
    for (size_t t = 0; t < tables.size(); ++t) {
      if (tables[t] < 0) continue;
      int64_t generation = kNow;
      TF_RETURN_IF_ERROR(GenerationAt(column_generations_, first_column + t, generations, &generation));
      for (int64_t i = first[t]; i < first[t + 1]; ++i) came[i].generation = generation;
      auto& target = (*gradients)[tables[t]];
      target.insert(target.end(), came.begin() + first[t], came.begin() + first[t + 1]);
    }
    table += group_sizes_[i];
    dimension += group_sizes_[i];
    lookup += group_lookups_[i];
  }
  return absl::OkStatus();
}

}  // namespace sok::tf
