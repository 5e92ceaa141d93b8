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

LocatedTables::LocatedTables(const TableList& list, at::TensorList tables, int64_t training, bool keeps_rows)
    : tables_(tables.vec()),
      indexed_(list.indexed_tables()),
      is_evaluated_(tables.size(), false),
      reads_(keeps_rows || !device_of(tables).is_cpu()),
      generations_(tables.size(), 0),
      flags_(SOK_LOCATE_INSERT | SOK_LOCATE_ADMIT | (training == kTrainsWithFilter ? SOK_LOCATE_FILTER : 0)) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < tables.size(); ++i) {
    if (!indexed_[i].defined()) continue;
    is_evaluated_[i] = training == kEvaluates || !tables[i].requires_grad();
    if (is_evaluated_[i]) tables_[i] = reads_ ? room(tables[i], 0) : tables[i].detach();
    if (is_evaluated_[i] && !reads_) {
      by_key_.push_back(static_cast<int64_t>(i));
    } else {
      locates_ = true;
    }
  }
}

void LocatedTables::locate(const Context& context, const std::vector<sok_placement>& placements,
                           std::vector<sok_lookup>* lookups) {
  const at::NoGradGuard no_grad;
  const auto num_tables = static_cast<int32_t>(tables_.size());
  std::vector<const sok_index*> indices(tables_.size(), nullptr);
  for (size_t i = 0; i < tables_.size(); ++i) {
    if (indexed_[i].defined()) indices[i] = is_evaluated_[i] ? &kLeavesSlots : indexed_[i]->index();
  }
  SOK_CALL_GROWING(context.device(), sok_locate(context.get(), num_tables, placements.data(), indices.data(),
                                                static_cast<int32_t>(lookups->size()), lookups->data(), flags_));
  for (size_t i = 0; i < tables_.size(); ++i) {
    if (!indexed_[i].defined() || is_evaluated_[i]) continue;
    indexed_[i]->grown();
    generations_[i] = indexed_[i]->generation();
  }
  if (reads_) return read(context, *lookups);
  for (sok_lookup& lookup : *lookups) {
    if (is_evaluated_[lookup.table]) lookup.slots = kAbsent;
  }
}

void LocatedTables::read(const Context& context, const std::vector<sok_lookup>& lookups) {
  std::vector<int64_t> num_read(tables_.size(), 0);
  for (const sok_lookup& lookup : lookups) num_read[lookup.table] += lookup.keys.shape[0];
  for (size_t i = 0; i < tables_.size(); ++i) {
    if (is_evaluated_[i]) tables_[i] = room(tables_[i], num_read[i]);
  }
  std::vector<int64_t> first(tables_.size(), 0);
  for (const sok_lookup& lookup : lookups) {
    const int64_t n = lookup.keys.shape[0];
    if (!is_evaluated_[lookup.table] || n == 0) continue;
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
  const bool records = at::GradMode::is_enabled();
  const bool keeps_rows = records && std::any_of(lookups->weights.begin(), lookups->weights.end(),
                                                 [](const at::Tensor& weight) { return weight.requires_grad(); });
  LocatedTables result(list, tables, records ? training : kEvaluates, keeps_rows);
  if (!result.locates() && list.num_members().empty()) return result;  // keys are checked where rows are read
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
  result.locate(context, placements_of(list.names(), list.owners(), list.num_rows(), dimensions, 1, 0), &asked);
  for (size_t i = 0; i < asked.size(); ++i) {
    if (asked[i].slots.rank != 0) lookups->keys[i] = std::move(slots[i]);
  }
  return result;
}

}  // namespace sok_torch
