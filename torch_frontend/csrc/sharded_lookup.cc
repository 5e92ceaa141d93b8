// SPDX-License-Identifier: Apache-2.0
#include "sharded_lookup.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <numeric>
#include <utility>

#include "views.h"

namespace sok_torch {
namespace {

LookupArguments arguments_of(const LookupLists& lookups) {
  return {lookups.keys,   lookups.key_tables, lookups.combiners, lookups.row_splits,
          lookups.bagged, lookups.weights,    lookups.weighted};
}

}  // namespace

ShardedLookup::ShardedLookup(c10::intrusive_ptr<TableList> list, LookupLists lookups, int64_t num_ranks, int64_t rank,
                             bool concat)
    : list_(std::move(list)),
      tables_(list_->tables()),
      dimensions_(dimensions_of(tables_)),
      num_ranks_(num_ranks),
      rank_(rank),
      lookups_(std::move(lookups)),
      concat_(concat) {
  TORCH_CHECK(!tables_.empty(), "a table of the call is gone");
  versions_ = versions_now();
  const LookupLists& all = lookups_;
  if (concat_) {
    std::vector<int64_t> bags;
    for (const at::Tensor& keys : all.keys) bags.push_back(keys.size(0));
    for (size_t j = 0; j < all.bagged.size(); ++j) bags.at(all.bagged[j]) = all.row_splits.at(j).size(0) - 1;
    check_equal_bags(bags);
  }
  std::vector<int64_t> chosen(all.keys.size(), 0);
  if (!all.bagged.empty()) {
    chosen = choose_pooling(placement(), arguments_of(all));
  }
  for (size_t i = 0; i < chosen.size(); ++i) (chosen[i] != 0 ? pooled_ : others_).push_back(static_cast<int64_t>(i));
  if (!pooled_.empty()) {
    bags_ = select(all, pooled_);
    bag_routing_ = route_bags(placement(), arguments_of(bags_));
  }
  if (pooled_.empty() || !others_.empty()) {
    rows_ = pooled_.empty() ? all : select(all, others_);
    row_routing_ = route(placement(), arguments_of(rows_));
  }
}

Placement ShardedLookup::placement() const {
  return {list_->names(), list_->owners(), list_->num_rows(), dimensions_, num_ranks_, rank_};
}

std::vector<int64_t> ShardedLookup::versions_now() const {
  std::vector<int64_t> result;
  for (const std::vector<at::Tensor>* tensors : {&lookups_.keys, &lookups_.row_splits, &lookups_.weights}) {
    for (const at::Tensor& tensor : *tensors) result.push_back(tensor.is_inference() ? -1 : tensor._version());
  }
  return result;
}

CountMessage ShardedLookup::message() const {
  const auto num_tables = static_cast<int64_t>(tables_.size()),
             num_lookups = static_cast<int64_t>(lookups_.keys.size());
  const int64_t num_columns = num_tables + 2 * num_lookups + 1;
  at::Tensor known = at::zeros({num_ranks_, num_columns}, at::TensorOptions().dtype(at::kLong).device(at::kCPU));
  int64_t* const first_splits = known.mutable_data_ptr<int64_t>() + num_tables + num_lookups;
  for (size_t j = 0; j < pooled_.size(); ++j) {
    const int64_t owner = list_->owners()[bags_.key_tables[j]];
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      if (owner >= 0 && owner != rank) continue;
      first_splits[rank * num_columns + pooled_[j]] = bags_.row_splits[j].size(0);
    }
  }
  std::vector<at::Tensor> counts;
  std::vector<int64_t> columns;
  if (row_routing_.counts.defined()) {
    counts.push_back(row_routing_.counts);
    columns.resize(num_tables);
    std::iota(columns.begin(), columns.end(), 0);
  }
  if (bag_routing_.counts.defined()) counts.push_back(bag_routing_.counts);
  for (const int64_t i : pooled_) columns.push_back(num_tables + i);
  return {known, counts, columns};
}

at::Tensor ShardedLookup::keys(const at::Tensor& sent, const at::Tensor& received) {
  sent_.emplace(sent, dimensions_, list_->positions());
  asked_ = std::make_shared<AskedRows>(
      AskedRows{MessageCounts(received, dimensions_, list_->positions()), dimensions_, {}, {}, {}});
  return join({row_routing_.keys, bag_routing_.keys, bag_routing_.splits}, sent_->in_keys());
}

ShardedLookup::Sizes ShardedLookup::sizes() const {
  TORCH_CHECK(asked_ != nullptr, "sizes come after the counts");
  const MessageCounts& asked = asked_->counts;
  return {totals(sent_->in_keys()), totals(asked.in_keys()), totals(asked.in_rows()), totals(sent_->in_rows())};
}

at::Tensor ShardedLookup::gather(const at::Tensor& keys) {
  TORCH_CHECK(asked_ != nullptr, "gather comes after the counts");
  const MessageCounts& counts = asked_->counts;
  const std::vector<at::Tensor> arrays = split(keys, counts.in_keys());
  std::vector<int64_t> tables(counts.rows.size());
  for (size_t i = 0; i < tables.size(); ++i) tables[i] = static_cast<int64_t>(i % tables_.size());
  asked_->slots = locate(placement(), tables, counts.rows, arrays[0]);
  const at::Tensor rows = sok_torch::gather(tables_, list_->names(), tables, counts.rows, {}, asked_->slots, {});
  if (!counts.pooled()) return rows;
  const std::vector<int64_t>& positions = list_->positions();
  std::vector<int64_t> part_tables, part_keys, part_bags;
  for (size_t i = 0; i < counts.splits.size(); ++i) {
    if (counts.splits[i] == 0) continue;
    const int64_t table = positions[i % positions.size()], owner = list_->owners()[table];
    TORCH_CHECK_VALUE(owner < 0 || owner == rank_, "lookup ", i % positions.size(), " names table ",
                      list_->names().get(table), ", which lives on rank ", owner);
    part_tables.push_back(table);
    part_keys.push_back(counts.keys[i]);
    part_bags.push_back(counts.splits[i] - 1);
  }
  asked_->part_slots = locate(placement(), part_tables, part_keys, arrays[1]);
  asked_->splits = arrays[2];
  const at::Tensor sums =
      sok_torch::gather(tables_, list_->names(), part_tables, part_keys, part_bags, asked_->part_slots, asked_->splits);
  return join({rows, sums}, counts.in_rows());
}

std::vector<at::Tensor> ShardedLookup::combine(const at::Tensor& rows) {
  TORCH_CHECK(sent_.has_value(), "combine comes after the counts");
  const std::vector<at::Tensor> arrays = split(rows, sent_->in_rows());
  for (const at::Tensor& weight : lookups_.weights) {
    if (weight.requires_grad()) exchanged_rows_ = arrays[0];
  }
  const bool whole = concat_ && (rows_.keys.empty() || bags_.keys.empty());  // else they are copied together
  std::vector<at::Tensor> of_rows, of_bags;
  if (!rows_.keys.empty()) {
    of_rows = sok_torch::combine(arrays[0], placement(), arguments_of(rows_), row_routing_.inverse, whole);
  }
  if (!bags_.keys.empty()) {
    of_bags = combine_bags(arrays[1], placement(), arguments_of(bags_), bag_routing_.scales, whole);
  }
  if (of_bags.empty()) return of_rows;
  if (of_rows.empty()) return of_bags;
  std::vector<at::Tensor> outputs(others_.size() + pooled_.size());
  for (size_t j = 0; j < others_.size(); ++j) outputs[others_[j]] = std::move(of_rows[j]);
  for (size_t j = 0; j < pooled_.size(); ++j) outputs[pooled_[j]] = std::move(of_bags[j]);
  if (concat_) return {at::cat(outputs, 1)};
  return outputs;
}

OptionalTensors ShardedLookup::of_lookups(const OptionalTensors& gradients) const {
  if (!concat_) return gradients;
  TORCH_CHECK_VALUE(gradients.size() == 1, "there is one output, not ", gradients.size());
  const std::optional<at::Tensor> gradient = gradients.get(0);
  OptionalTensors result;
  if (!gradient.has_value()) {
    result.resize(lookups_.key_tables.size());
    return result;
  }
  std::vector<int64_t> widths;
  for (const int64_t table : lookups_.key_tables) widths.push_back(dimensions_[table]);
  for (const at::Tensor& columns : columns_of(*gradient, widths)) result.push_back(columns);
  return result;
}

OptionalTensors ShardedLookup::of_kind(const std::vector<int64_t>& lookups, const OptionalTensors& gradients) const {
  OptionalTensors result;
  for (const int64_t i : lookups) result.push_back(gradients.get(i));
  return result;
}

std::tuple<std::optional<at::Tensor>, std::vector<at::Tensor>> ShardedLookup::spread(const OptionalTensors& gradients,
                                                                                     bool of_tables,
                                                                                     bool of_weights) const {
  const at::NoGradGuard no_grad;
  TORCH_CHECK(
      versions_now() == versions_,
      "one of the variables needed for gradient computation has been modified by an inplace operation: ids, row "
      "splits or weights of a lookup");
  const OptionalTensors given = of_lookups(gradients);
  TORCH_CHECK_VALUE(given.size() == lookups_.key_tables.size(), "spread needs one output gradient (or None) a lookup");
  std::tuple<std::optional<at::Tensor>, std::vector<at::Tensor>> result;
  OptionalTensors rows_given;
  if (!rows_.keys.empty()) rows_given = of_kind(others_, given);
  if (of_tables) {
    at::Tensor rows, sums;
    if (!rows_.keys.empty()) {
      rows = sok_torch::spread(rows_given, placement(), arguments_of(rows_), row_routing_, sent_->rows);
    }
    if (!bags_.keys.empty()) {
      sums = spread_bags(of_kind(pooled_, given), placement(), arguments_of(bags_), bag_routing_.scales);
    }
    std::get<0>(result) = join({rows, sums}, sent_->in_rows());
  }
  if (of_weights) {  // lookups with weights are among the rows
    std::get<1>(result) =
        weight_gradient_of_rows(rows_given, placement(), arguments_of(rows_), row_routing_.inverse, exchanged_rows_);
  }
  return result;
}

c10::intrusive_ptr<ExchangedGradients> ShardedLookup::gradients(at::Tensor values) const {
  return c10::make_intrusive<ExchangedGradients>(list_, asked_, std::move(values));
}

void ShardedLookup::release() {
  for (LookupLists* lists : {&lookups_, &rows_, &bags_}) {
    lists->keys.clear();
    lists->row_splits.clear();
    lists->weights.clear();
  }
  row_routing_ = {};
  bag_routing_ = {};
  exchanged_rows_.reset();
  asked_.reset();
}

c10::intrusive_ptr<ShardedLookup> route_lookups(const c10::intrusive_ptr<TableList>& list, std::vector<at::Tensor> keys,
                                                std::vector<int64_t> combiners, std::vector<at::Tensor> row_splits,
                                                std::vector<int64_t> bagged, std::vector<at::Tensor> weights,
                                                std::vector<int64_t> weighted, int64_t num_ranks, int64_t rank,
                                                bool concat) {
  LookupLists lookups{std::move(keys),   list->positions(),  std::move(combiners), std::move(row_splits),
                      std::move(bagged), std::move(weights), std::move(weighted)};
  return c10::make_intrusive<ShardedLookup>(list, std::move(lookups), num_ranks, rank, concat);
}

}  // namespace sok_torch
