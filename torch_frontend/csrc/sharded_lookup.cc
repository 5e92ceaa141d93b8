// SPDX-License-Identifier: Apache-2.0
#include "sharded_lookup.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <utility>

#include "context.h"
#include "lookup_node.h"
#include "sok/gradient.h"
#include "sok/lookup.h"
#include "status.h"

namespace sok_torch {

namespace {

std::vector<at::Tensor> tables_of(const TableList& list) {
  std::vector<at::Tensor> tables = list.tables();
  TORCH_CHECK(!tables.empty(), "a table of the call is gone");
  return tables;
}

}  // namespace

sok_routing ShardedLookup::Routing::view() const {
  sok_routing result = SOK_ROUTING_INIT;
  result.keys = sok_torch::view(keys, "keys");
  result.counts = sok_torch::view(counts, "counts");
  result.inverse = sok_torch::view(inverse, "inverse");
  result.order = sok_torch::view(order, "order");
  result.unique_splits = sok_torch::view(unique_splits, "unique_splits");
  result.bag_keys = sok_torch::view(bag_keys, "bag_keys");
  result.bag_splits = sok_torch::view(bag_splits, "bag_splits");
  return result;
}

ShardedLookup::ShardedLookup(c10::intrusive_ptr<TableList> list, LookupLists lookups, int64_t num_ranks, int64_t rank,
                             bool concat, int64_t training)
    : list_(std::move(list)),
      tables_(tables_of(*list_)),
      dimensions_(dimensions_of(tables_)),
      placements_(placements_of(list_->names(), list_->owners(), list_->num_rows(), dimensions_, num_ranks, rank)),
      lookups_(std::move(lookups)),
      views_(lookups_.arguments()),
      kept_(lookups_.borrow()),
      concat_(concat) {
  if (list_->indexed()) {
    list_->check_keys(lookups_.keys);
    tables_ = located_.emplace(*list_, tables_, training, false).tables();
  }
  const c10::Device device = device_of(at::TensorList(lookups_.keys));
  list_->set_members(&views_);
  if (concat_) views_.check_equal_bags();
  std::vector<int32_t> pooled(views_.size());
  sok_batch batch = {sizeof(sok_batch), pooled.data(), 0, 0, 0};
  const Context context(device, Earlier::kRaised);
  SOK_CALL(sok_split_batch(context.get(), count(), placements_.data(), views_.size(), views_.data(), &batch));
  const at::TensorOptions int64 = at::TensorOptions().device(device).dtype(at::kLong), int32 = int64.dtype(at::kInt);
  const int64_t num_columns = count() + 2 * static_cast<int64_t>(views_.size()) + 1;
  routing_ = {at::empty({num_ranks, num_columns}, int64), at::empty({batch.num_entries}, int64),
              at::empty({batch.num_entries}, int64),      at::empty({batch.num_entries}, int32),
              at::empty({batch.num_entries + 1}, int32),  at::empty({batch.num_bag_keys}, int64),
              at::empty({batch.num_bag_splits}, int64)};
  const sok_routing routing = routing_.view();
  SOK_CALL(
      sok_route(context.get(), count(), placements_.data(), views_.size(), views_.data(), pooled.data(), &routing));
}

at::Tensor ShardedLookup::keys(const at::Tensor& sent, const at::Tensor& received) {
  sent_.emplace(sent, dimensions_, list_->positions());
  asked_.emplace(Asked{Messages(received, dimensions_, list_->positions()), {}, {}});
  const sok_messages& messages = sent_->view;
  if (messages.num_bag_splits == 0) {
    TORCH_CHECK_VALUE(messages.num_keys <= routing_.keys.size(0), "the batch has fewer than ", messages.num_keys,
                      " elements to send");
    return routing_.keys.narrow(0, 0, messages.num_keys);
  }
  at::Tensor keys = at::empty({messages.num_keys}, routing_.keys.options());
  const sok_routing routing = routing_.view();
  const Context context(keys.device());
  SOK_CALL(sok_join_keys(context.get(), &messages, &routing, view(keys, "keys")));
  return keys;
}

ShardedLookup::Sizes ShardedLookup::sizes() const {
  TORCH_CHECK(asked_.has_value(), "sizes come after the counts");
  const Messages& asked = asked_->messages;
  return {sent_->keys, asked.keys, asked.floats, sent_->floats};
}

at::Tensor ShardedLookup::gather(const at::Tensor& keys) {
  TORCH_CHECK(asked_.has_value(), "gather comes after the counts");
  const sok_messages& messages = asked_->messages.view;
  const at::Tensor slots = at::empty_like(keys);
  if (messages.num_bag_splits > 0) asked_->keys = keys;
  at::Tensor floats = at::empty({messages.num_floats}, keys.options().dtype(at::kFloat));
  std::vector<sok_lookup> came(messages.num_parts);
  check(sok_owner_lookups(&messages, view(keys, "keys"), view(slots, "slots"), view(floats, "floats"), came.data()));
  const Context context(keys.device());
  const IndexedTable::Use use(tables_, located_.has_value() && located_->locates());
  at::IntArrayRef by_key;
  if (located_.has_value()) {
    located_->locate(context, placements_, &came);
    tables_ = located_->tables();
    by_key = located_->by_key();
  } else {
    SOK_CALL(sok_locate(context.get(), count(), placements_.data(), nullptr, messages.num_parts, came.data(), 0));
  }
  asked_->slots = slots;
  const std::vector<sok_columns> columns = make_columns(tables_, list_->names(), by_key);
  SOK_CALL(sok_gather_combine(context.get(), count(), columns.data(), messages.num_parts, came.data()));
  return floats;
}

std::vector<at::Tensor> ShardedLookup::combine(const at::Tensor& floats) {
  TORCH_CHECK(sent_.has_value(), "combine comes after the counts");
  for (const at::Tensor& weight : lookups_.weights) {
    if (weight.requires_grad()) floats_ = floats;
  }
  std::vector<at::Tensor> outputs = views_.allocate_outputs(dimensions_, concat_, floats.options());
  const Context context(floats.device());
  SOK_CALL(sok_combine(context.get(), count(), placements_.data(), views_.size(), views_.data(), &sent_->view,
                       view(routing_.inverse, "inverse"), view(floats, "floats")));
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
  for (const at::Tensor& columns : columns_of(*gradient, views_.widths(dimensions_))) result.push_back(columns);
  return result;
}

std::tuple<std::optional<at::Tensor>, std::vector<at::Tensor>> ShardedLookup::spread(const OptionalTensors& gradients,
                                                                                     bool of_tables,
                                                                                     bool of_weights) const {
  const at::NoGradGuard no_grad;
  check_unchanged(kept_);
  TORCH_CHECK(sent_.has_value() && routing_.inverse.defined(), "spread comes after the counts");
  const OutputGradients given(of_lookups(gradients), views_);
  std::tuple<std::optional<at::Tensor>, std::vector<at::Tensor>> result;
  const sok_messages& messages = sent_->view;
  const Context context(routing_.inverse.device());
  if (of_tables) {
    at::Tensor floats = at::empty({messages.num_floats}, routing_.inverse.options().dtype(at::kFloat));
    const sok_routing routing = routing_.view();
    SOK_CALL(sok_spread(context.get(), count(), placements_.data(), views_.size(), views_.data(), given.data(),
                        &messages, &routing, view(floats, "gradients")));
    std::get<0>(result) = std::move(floats);
  }
  if (of_weights && !lookups_.weights.empty()) {
    WeightGradients wanted(lookups_.weights, lookups_.weighted, views_);
    SOK_CALL(sok_weight_gradient_of_rows(context.get(), count(), placements_.data(), views_.size(), views_.data(),
                                         given.data(), &messages, view(routing_.inverse, "inverse"),
                                         view(floats_, "floats"), wanted.views.data()));
    std::get<1>(result) = std::move(wanted.results);
  }
  return result;
}

c10::intrusive_ptr<CallGradient> ShardedLookup::gradient(const at::Tensor& values) const {
  TORCH_CHECK(asked_.has_value(), "gradients come after gather");
  const sok_messages& messages = asked_->messages.view;
  if (!asked_->slots.defined()) {  // gather failed, so no table will be stepped
    return c10::make_intrusive<CallGradient>(list_->names(), std::vector<sok_gradient>(),
                                             std::vector<int64_t>(count() + 1, 0), Borrowed());
  }
  std::vector<sok_gradient> summands(messages.num_parts);
  std::vector<int64_t> first(count() + 1);
  Borrowed tensors;
  tensors.keep({values, asked_->slots});
  if (asked_->keys.defined()) tensors.keep(asked_->keys);
  check(sok_owner_gradients(&messages, asked_->keys.defined() ? view(asked_->keys, "keys") : kAbsent,
                            view(asked_->slots, "slots"), view(values, "values"), summands.data(), first.data()));
  if (located_.has_value()) {
    for (int32_t table = 0; table < count(); ++table) {
      for (int64_t i = first[table]; i < first[table + 1]; ++i) summands[i].generation = located_->generations()[table];
    }
  }
  return c10::make_intrusive<CallGradient>(list_->names(), std::move(summands), std::move(first), std::move(tensors));
}

void ShardedLookup::release() {
  lookups_.release();
  kept_.clear();
  routing_ = {};
  floats_.reset();
  asked_.reset();
  tables_.clear();
  located_.reset();
}

c10::intrusive_ptr<ShardedLookup> route_lookups(const c10::intrusive_ptr<TableList>& list, std::vector<at::Tensor> keys,
                                                std::vector<int64_t> combiners, std::vector<at::Tensor> row_splits,
                                                std::vector<int64_t> bagged, std::vector<at::Tensor> weights,
                                                std::vector<int64_t> weighted, int64_t num_ranks, int64_t rank,
                                                bool concat) {
  LookupLists lookups{std::move(keys),   list->positions(),  std::move(combiners), std::move(row_splits),
                      std::move(bagged), std::move(weights), std::move(weighted)};
  return c10::make_intrusive<ShardedLookup>(list, std::move(lookups), num_ranks, rank, concat,
                                            at::GradMode::is_enabled());
}

std::vector<c10::intrusive_ptr<TableGradient>> table_gradients(const c10::intrusive_ptr<ShardedLookup>& lookup,
                                                               const at::Tensor& values) {
  const c10::intrusive_ptr<CallGradient> call = lookup->gradient(values);
  std::vector<c10::intrusive_ptr<TableGradient>> result;
  for (size_t i = 0; i < lookup->num_tables(); ++i) result.push_back(TableGradient::of_entries({{call, i, 1.0}}));
  return result;
}

}  // namespace sok_torch
