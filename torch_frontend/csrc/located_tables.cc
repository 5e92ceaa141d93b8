// SPDX-License-Identifier: Apache-2.0
#include "located_tables.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "sok/status.h"
#include "status.h"
#include "views.h"

namespace sok_torch {
namespace {

// For so many rows of a table.
at::Tensor room(const at::Tensor& table, int64_t rows) {
  return at::empty({rows, table.size(1)}, table.options().requires_grad(false));
}

// The index of a table that is read: its slots come with its rows.
const sok_index kLeavesSlots = {
    sizeof(sok_index), nullptr,
    [](const sok_context*, int32_t, const sok_index_request*, uint32_t) -> int { return SOK_OK; }};

}  // namespace

LocatedTables::LocatedTables(const TableList& list, at::TensorList tables, int64_t training)
    : tables_(tables.vec()),
      indexed_(list.indexed_tables()),
      is_read_(tables.size(), false),
      finds_(training == kInfers && device_of(tables).is_cpu()),
      generations_(tables.size(), 0),
      flags_(SOK_LOCATE_INSERT | SOK_LOCATE_ADMIT | (training == kTrainsWithFilter ? SOK_LOCATE_FILTER : 0)) {
  const at::NoGradGuard no_grad;
  const bool is_training = training == kTrains || training == kTrainsWithFilter;
  for (size_t i = 0; i < tables.size(); ++i) {
    is_read_[i] = indexed_[i].defined() && !(is_training && tables[i].requires_grad());
    if (is_read_[i] && !finds_) tables_[i] = room(tables[i], 0);
  }
}

void LocatedTables::locate(const Context& context, const std::vector<sok_placement>& placements,
                           const std::vector<sok_lookup>& lookups) {
  const at::NoGradGuard no_grad;
  const auto num_tables = static_cast<int32_t>(tables_.size());
  std::vector<const sok_index*> indices(tables_.size(), nullptr);
  for (size_t i = 0; i < tables_.size(); ++i) {
    if (indexed_[i].defined()) indices[i] = is_read_[i] && !finds_ ? &kLeavesSlots : indexed_[i]->index();
  }
  const uint32_t flags = finds_ ? 0 : flags_;
  SOK_CALL_GROWING(context.device(), sok_locate(context.get(), num_tables, placements.data(), indices.data(),
                                                static_cast<int32_t>(lookups.size()), lookups.data(), flags));
  for (size_t i = 0; i < tables_.size(); ++i) {
    if (!indexed_[i].defined() || is_read_[i]) continue;
    indexed_[i]->grown();
    generations_[i] = indexed_[i]->generation();
  }
  if (finds_) {
    std::vector<bool> lacks(tables_.size(), false);
    for (const sok_lookup& lookup : lookups) {
      const auto* const slots = static_cast<const int64_t*>(lookup.slots.data);
      if (std::any_of(slots, slots + lookup.keys.shape[0], [](int64_t slot) { return slot < 0; }))
        lacks[lookup.table] = true;
    }
    for (size_t i = 0; i < tables_.size(); ++i) is_read_[i] = is_read_[i] && lacks[i];
  }
  read(context, lookups);
}

void LocatedTables::read(const Context& context, const std::vector<sok_lookup>& lookups) {
  std::vector<int64_t> num_read(tables_.size(), 0);
  for (const sok_lookup& lookup : lookups) {
    if (is_read(lookup)) num_read[lookup.table] += lookup.keys.shape[0];
  }
  for (size_t i = 0; i < tables_.size(); ++i) {
    if (is_read_[i]) tables_[i] = room(tables_[i], num_read[i]);
  }
  std::vector<int64_t> first(tables_.size(), 0);
  for (const sok_lookup& lookup : lookups) {
    const int64_t n = lookup.keys.shape[0];
    if (!is_read(lookup) || n == 0) continue;
    const at::Tensor& rows = tables_[lookup.table];
    int64_t& begin = first[lookup.table];
    indexed_[lookup.table]->read(context.get(), lookup.keys, rows.narrow(0, begin, n));
    at::Tensor slots =
        at::from_blob(lookup.slots.data, {n}, [](void*) {}, rows.options().dtype(at::kLong), rows.device());
    at::arange_out(slots, begin, begin + n, 1);
    begin += n;
  }
}

namespace {

c10::Device common_device(at::TensorList tables, const LookupLists& lookups) {
  const c10::Device device = device_of(tables);
  TORCH_CHECK_VALUE(device_of(at::TensorList(lookups.keys)) == device, "tables are on ", device, " and ids on ",
                    lookups.keys[0].device());
  return device;
}

Lookups checked_lookups(const TableList& list, const LookupLists& lookups, bool concat) {
  Lookups views(lookups.arguments());
  list.set_members(&views);
  if (concat) views.check_equal_bags();
  return views;
}

}  // namespace

void locate_members(const TableList& list, at::TensorList tables, LookupLists* lookups, bool concat) {
  const c10::Device device = common_device(tables, *lookups);
  const Lookups views = checked_lookups(list, *lookups, concat);
  std::vector<sok_lookup> asked;
  std::vector<std::pair<size_t, at::Tensor>> slots;
  for (size_t i = 0; i < lookups->keys.size(); ++i) {
    sok_lookup lookup = views.data()[i];
    if (lookup.num_members == 0) continue;
    slots.emplace_back(i, at::empty({lookup.keys.shape[0]}, at::TensorOptions().dtype(at::kLong).device(device)));
    lookup.slots = view(slots.back().second, "slots");
    asked.push_back(lookup);
  }
  const std::vector<int64_t> dimensions = dimensions_of(tables);
  const std::vector<sok_placement> placements =
      placements_of(list.names(), list.owners(), list.num_rows(), dimensions, 1, 0);
  const Context context(device, Earlier::kRaised);
  SOK_CALL(sok_locate(context.get(), static_cast<int32_t>(placements.size()), placements.data(), nullptr,
                      static_cast<int32_t>(asked.size()), asked.data(), 0));
  for (auto& [i, tensor] : slots) lookups->keys[i] = std::move(tensor);
}

LocatedTables locate(const TableList& list, at::TensorList tables, LookupLists* lookups, bool concat,
                     int64_t training) {
  const c10::Device device = common_device(tables, *lookups);
  LocatedTables result(list, tables, at::GradMode::is_enabled() ? training : kInfers);
  const Lookups views = checked_lookups(list, *lookups, concat);
  std::vector<sok_lookup> asked(views.data(), views.data() + views.size());
  std::vector<at::Tensor> slots;
  slots.reserve(asked.size());
  for (sok_lookup& lookup : asked) {
    slots.push_back(at::empty({lookup.keys.shape[0]}, at::TensorOptions().dtype(at::kLong).device(device)));
    lookup.slots = view(slots.back(), "slots");
  }
  const std::vector<int64_t> dimensions = dimensions_of(tables);
  const Context context(device, Earlier::kRaised);
  result.locate(context, placements_of(list.names(), list.owners(), list.num_rows(), dimensions, 1, 0), asked);
  lookups->keys = std::move(slots);
  return result;
}

}  // namespace sok_torch
