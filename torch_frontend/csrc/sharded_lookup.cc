// SPDX-License-Identifier: Apache-2.0
#include "sharded_lookup.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <numeric>
#include <utility>

#include "lookup_node.h"
#include "views.h"

namespace sok_torch {
namespace {

void check_size(const at::Tensor& tensor, at::ScalarType dtype, const std::vector<int64_t>& sizes, const char* what) {
  const int64_t size = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  TORCH_CHECK_VALUE(tensor.defined() && tensor.dim() == 1 && tensor.size(0) == size && tensor.scalar_type() == dtype &&
                        tensor.is_contiguous(),
                    what, " must be [", size, "] ", dtype);
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
  kept_ = lookups_.borrow();
  const LookupLists& all = lookups_;
  if (concat_) {
    std::vector<int64_t> bags;
    for (const at::Tensor& keys : all.keys) bags.push_back(keys.size(0));
    for (size_t j = 0; j < all.bagged.size(); ++j) bags.at(all.bagged[j]) = all.row_splits.at(j).size(0) - 1;
    check_equal_bags(bags);
  }
  std::vector<int64_t> chosen(all.keys.size(), 0);
  if (!all.bagged.empty()) {
    chosen = choose_pooling(placement(), all.arguments());
  }
  for (size_t i = 0; i < chosen.size(); ++i) (chosen[i] != 0 ? pooled_ : others_).push_back(static_cast<int64_t>(i));
  if (!pooled_.empty()) {
    bags_ = select(all, pooled_);
    bag_routing_ = route_bags(placement(), bags_.arguments());
  }
  if (pooled_.empty() || !others_.empty()) {
    rows_ = pooled_.empty() ? all : select(all, others_);
    row_routing_ = route(placement(), rows_.arguments());
  }
}

Placement ShardedLookup::placement() const {
  return {list_->names(), list_->owners(), list_->num_rows(), dimensions_, num_ranks_, rank_};
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
  asked_.emplace(AskedRows{MessageCounts(received, dimensions_, list_->positions()), {}, {}, {}});
  return join({row_routing_.keys, bag_routing_.keys, bag_routing_.splits}, sent_->in_keys());
}

ShardedLookup::Sizes ShardedLookup::sizes() const {
  TORCH_CHECK(asked_.has_value(), "sizes come after the counts");
  const MessageCounts& asked = asked_->counts;
  return {totals(sent_->in_keys()), totals(asked.in_keys()), totals(asked.in_rows()), totals(sent_->in_rows())};
}

at::Tensor ShardedLookup::gather(const at::Tensor& keys) {
  TORCH_CHECK(asked_.has_value(), "gather comes after the counts");
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
    of_rows = sok_torch::combine(arrays[0], placement(), rows_.arguments(), row_routing_.inverse, whole);
  }
  if (!bags_.keys.empty()) {
    of_bags = combine_bags(arrays[1], placement(), bags_.arguments(), bag_routing_.scales, whole);
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
  check_unchanged(kept_);
  const OptionalTensors given = of_lookups(gradients);
  TORCH_CHECK_VALUE(given.size() == lookups_.key_tables.size(), "spread needs one output gradient (or None) a lookup");
  std::tuple<std::optional<at::Tensor>, std::vector<at::Tensor>> result;
  OptionalTensors rows_given;
  if (!rows_.keys.empty()) rows_given = of_kind(others_, given);
  if (of_tables) {
    at::Tensor rows, sums;
    if (!rows_.keys.empty()) {
      rows = sok_torch::spread(rows_given, placement(), rows_.arguments(), row_routing_, sent_->rows);
    }
    if (!bags_.keys.empty()) {
      sums = spread_bags(of_kind(pooled_, given), placement(), bags_.arguments(), bag_routing_.scales);
    }
    std::get<0>(result) = join({rows, sums}, sent_->in_rows());
  }
  if (of_weights) {  // lookups with weights are among the rows
    std::get<1>(result) =
        weight_gradient_of_rows(rows_given, placement(), rows_.arguments(), row_routing_.inverse, exchanged_rows_);
  }
  return result;
}

c10::intrusive_ptr<CallGradient> ShardedLookup::gradient(const at::Tensor& values) const {
  TORCH_CHECK(asked_.has_value(), "gradients come after the counts");
  const MessageCounts& counts = asked_->counts;
  std::vector<int64_t> elements = counts.elements_of_rows;
  elements.insert(elements.end(), counts.elements_of_sums.begin(), counts.elements_of_sums.end());
  check_size(values, at::kFloat, elements, "values");
  check_size(asked_->slots, at::kLong, counts.keys_of_rows, "slots");
  Borrowed tensors;
  tensors.keep({values, asked_->slots});
  sok_gradient of_row = SOK_GRADIENT_INIT, of_bag = SOK_GRADIENT_INIT;
  of_row.slots = view(asked_->slots, "slots");
  of_row.flags |= SOK_GRADIENT_UNIQUE;
  if (counts.pooled()) {
    check_size(asked_->part_slots, at::kLong, counts.keys_of_bags, "part_slots");
    check_size(asked_->splits, at::kLong, counts.splits_of_bags, "splits");
    tensors.keep({asked_->part_slots, asked_->splits});
    of_bag.slots = view(asked_->part_slots, "part_slots");
    of_bag.row_splits = view(asked_->splits, "splits");
  }
  int64_t slot = 0, part_slot = 0, split = 0, element = 0;
  const sok_tensor all = view(values, "values");
  const auto take = [&](int64_t rows, int64_t dimension) {
    sok_tensor result = all;
    result.data = static_cast<float*>(all.data) + element;
    result.rank = 2;
    result.shape[0] = rows;
    result.shape[1] = dimension;
    element += rows * dimension;
    return result;
  };
  const std::vector<int64_t>& positions = list_->positions();
  const size_t num_tables = dimensions_.size(), num_lookups = positions.size();
  std::vector<CallGradient::Part> parts, of_bags;
  for (size_t rank = 0; rank < counts.num_ranks(); ++rank) {
    for (size_t table = 0; table < num_tables; ++table) {
      const int64_t n = counts.rows[rank * num_tables + table];
      sok_gradient part = of_row;
      part.values = take(n, dimensions_[table]);
      part.slots = range(of_row.slots, slot, n);
      if (n > 0) parts.push_back({table, part});
      slot += n;
    }
    for (size_t lookup = 0; lookup < num_lookups; ++lookup) {
      const int64_t n = counts.keys[rank * num_lookups + lookup], splits = counts.splits[rank * num_lookups + lookup];
      if (splits == 0) continue;
      sok_gradient part = of_bag;
      part.values = take(splits - 1, dimensions_[positions[lookup]]);
      part.slots = range(of_bag.slots, part_slot, n);
      part.row_splits = range(of_bag.row_splits, split, splits);
      if (n > 0) of_bags.push_back({static_cast<size_t>(positions[lookup]), part});
      part_slot += n;
      split += splits;
    }
  }
  parts.insert(parts.end(), of_bags.begin(), of_bags.end());
  return c10::make_intrusive<CallGradient>(list_->names(), std::move(parts), std::move(tensors), /*of_all=*/true);
}

void ShardedLookup::release() {
  for (LookupLists* lists : {&lookups_, &rows_, &bags_}) lists->release();
  kept_.clear();
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

std::vector<c10::intrusive_ptr<TableGradient>> table_gradients(const c10::intrusive_ptr<ShardedLookup>& lookup,
                                                               const at::Tensor& values) {
  const c10::intrusive_ptr<CallGradient> call = lookup->gradient(values);
  std::vector<c10::intrusive_ptr<TableGradient>> result;
  for (size_t i = 0; i < lookup->num_tables(); ++i) result.push_back(TableGradient::of_entries({{call, i, 1.0}}));
  return result;
}

}  // namespace sok_torch
