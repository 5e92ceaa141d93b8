// SPDX-License-Identifier: Apache-2.0
// Entry points of the forward stages (sok/lookup.h, sok/coordinates.h).
#include <algorithm>

#include "api/dispatch.h"
#include "api/on_device.h"
#include "common/error_record.h"
#include "common/memory.h"
#include "common/messages.h"
#include "common/tensor.h"
#include "cpu/rows_of_call.h"
#include "table/index.h"

namespace sok {
namespace {

// Gives lookups of members keys of their stacks. temporary: a context with an allocator.
Buffer<int64_t> number_keys(const sok_context& temporary, std::vector<Lookup>* lookups) {
  std::vector<Lookup> of_members;
  int64_t num_keys = 0;
  for (const Lookup& lookup : *lookups) num_keys += lookup.num_members != 0 ? lookup.keys.size : 0;
  Buffer<int64_t> numbers(temporary, num_keys);
  num_keys = 0;
  for (Lookup& lookup : *lookups) {
    if (lookup.num_members == 0) continue;
    of_members.push_back(lookup);
    of_members.back().slots = numbers.data() + num_keys;
    lookup.keys = {numbers.data() + num_keys, lookup.keys.size, true};
    num_keys += lookup.keys.size;
  }
  SOK_DISPATCH_AS("route", temporary, number_keys, of_members);
  return numbers;
}

bool any_members(const std::vector<Lookup>& lookups) {
  return std::any_of(lookups.begin(), lookups.end(), [](const Lookup& lookup) { return lookup.num_members != 0; });
}

Routing check_routing(const sok_routing* routing, const SplitLookups& lookups, const BagParts& parts, int64_t num_ranks,
                      int64_t num_tables) {
  SOK_CHECK(routing != nullptr, "routing is NULL");
  SOK_CHECK(routing->struct_size == sizeof(sok_routing), "routing.struct_size is ", routing->struct_size, ", must be ",
            sizeof(sok_routing));
  const auto label = [](const char* field) { return Label{"routing", -1, field}; };
  const int64_t entries = count_entries(lookups.at_requester), bag_keys = count_entries(lookups.at_owner);
  Routing result = {};
  result.keys = checked_data<int64_t>(routing->keys, label("keys"), SOK_INT64, {entries});
  int64_t* const counts = checked_data<int64_t>(routing->counts, label("counts"), SOK_INT64, {num_ranks, kAnySize});
  const auto num_lookups = static_cast<int64_t>(lookups.at_requester.size() + lookups.at_owner.size());
  result.counts = {counts, num_ranks, routing->counts.shape[1], num_tables, num_lookups};
  const int64_t num_columns = num_tables + (lookups.at_owner.empty() ? 0 : 2 * num_lookups);
  SOK_CHECK(result.counts.num_columns >= num_columns, label("counts"), " has ", result.counts.num_columns,
            " columns, must have ", num_columns, " at least");
  result.inverse = checked_data<int64_t>(routing->inverse, label("inverse"), SOK_INT64, {entries});
  result.order = checked_data<int32_t>(routing->order, label("order"), SOK_INT32, {entries});
  result.unique_splits =
      checked_data<int32_t>(routing->unique_splits, label("unique_splits"), SOK_INT32, {entries + 1});
  if (lookups.at_owner.empty()) return result;
  result.bag_keys = checked_data<int64_t>(routing->bag_keys, label("bag_keys"), SOK_INT64, {bag_keys});
  result.bag_splits = checked_data<int64_t>(routing->bag_splits, label("bag_splits"), SOK_INT64, {parts.num_splits()});
  for (const Lookup& lookup : lookups.at_owner) {
    SOK_CHECK(lookup.weights == nullptr, Label{"lookups", lookup.number, "weights", lookup.id.name},
              " must be absent: lookups with weights are pooled at the requester");
  }
  return result;
}

}  // namespace
}  // namespace sok

using namespace sok;  // NOLINT: entry points only

extern "C" int sok_bags_from_coordinates(const sok_context* context, sok_tensor rows, int64_t num_bags,
                                         sok_tensor row_splits, sok_tensor order, sok_tensor sorted) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    SOK_CHECK(num_bags >= 0 && num_bags <= kMaxEntries, "num_bags is ", num_bags, ", must be in [0, 2^31)");
    int64_t stride = 1;
    if (rows.rank == 2) {
      check_tensor(rows, {"rows"}, {SOK_INT64}, {kAnySize, kAnySize});
      stride = rows.shape[1];
      SOK_CHECK(stride >= 1, "rows has shape [", rows.shape[0], ", 0], must have a column");
    } else {
      check_tensor(rows, {"rows"}, {SOK_INT64}, {kAnySize});
    }
    const int64_t n = rows.shape[0];
    SOK_CHECK(n <= kMaxEntries, "rows has ", n, " entries; a call takes fewer than 2^31");
    int64_t* splits_data = checked_data<int64_t>(row_splits, {"row_splits"}, SOK_INT64, {num_bags + 1});
    int64_t* order_data = checked_data<int64_t>(order, {"order"}, SOK_INT64, {n});
    int32_t* sorted_data = checked_data<int32_t>(sorted, {"sorted"}, SOK_INT32, {1});
    SOK_DISPATCH(checked, bags_from_coordinates, static_cast<const int64_t*>(rows.data), n, stride, num_bags,
                 splits_data, order_data, sorted_data);
  });
}

extern "C" int sok_route(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                         int32_t num_lookups, const sok_lookup* lookups, const int32_t* pooled,
                         const sok_routing* routing) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_placements(checked, num_tables, tables);
    const int32_t num_ranks = check_num_ranks(views);
    std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kRead, Output::kIgnored);
    const auto run = [&](const sok_context& with) {
      const SplitLookups split(looks, pooled);
      const BagParts parts(views, split.at_owner, num_ranks);
      const Routing out = check_routing(routing, split, parts, num_ranks, num_tables);
      SOK_DISPATCH(with, route, views, split.at_requester, parts.sums(), out);
      if (!split.at_owner.empty()) SOK_DISPATCH(with, route_bags, views, split.at_owner, parts, out);
    };
    if (!any_members(looks)) return run(checked);
    on_device(checked, [&](const sok_context& with) {
      const Buffer<int64_t> keys = number_keys(with, &looks);
      run(with);
    });
  });
}

extern "C" int sok_locate(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                          const sok_index* const* indices, int32_t num_lookups, const sok_lookup* lookups,
                          uint32_t flags) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_placements(checked, num_tables, tables);
    const std::vector<const sok_index*> of_tables = check_indices(views, indices);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kLocated, Output::kIgnored);
    SOK_CHECK((flags & ~(SOK_LOCATE_INSERT | SOK_LOCATE_ADMIT | SOK_LOCATE_FILTER | SOK_LOCATE_BESIDE)) == 0, "flags ",
              flags, " has unknown bits");
    for (const Lookup& lookup : looks) {
      const Table& table = views[static_cast<size_t>(lookup.table)];
      SOK_CHECK(is_absent(lookups[lookup.number].row_splits) || table.placement.lives_on(table.placement.rank),
                "table '", table.name, "' lives on rank ", table.placement.owner, ", but rank ", table.placement.rank,
                " was asked for sums of its rows");
    }
    std::vector<Lookup> of_members, others;
    for (const Lookup& lookup : looks) (lookup.num_members != 0 ? of_members : others).push_back(lookup);
    if (!of_members.empty()) {
      SOK_CHECK(check_num_ranks(views) == 1,
                "lookups of members are located where there is one rank; route takes them where there are several");
      SOK_DISPATCH_AS("locate", checked, number_keys, of_members);
      if (others.empty()) return;
    }
    const Placement place = views.empty() ? Placement{} : views[0].placement;
    if (checked.errors != nullptr) set_rank(checked.errors, place.rank, place.num_ranks);  // a device finds it later
    naming_rank(place.rank, place.num_ranks, [&] { SOK_DISPATCH(checked, locate, views, of_tables, others, flags); });
  });
}

extern "C" int sok_combine(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                           int32_t num_lookups, const sok_lookup* lookups, const sok_messages* messages,
                           sok_tensor inverse, sok_tensor floats) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_placements(checked, num_tables, tables);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kCounted, Output::kWritten);
    const Request request = read_request(views, looks, messages);
    const std::vector<Lookup>&rows = request.lookups.at_requester, &bags = request.lookups.at_owner;
    const int64_t size = messages != nullptr ? request.parts.num_elements() : kAnySize;
    const float* data = checked_data<const float>(floats, {"floats"}, SOK_FLOAT32, {size});
    const std::vector<RowSource> sources = check_exchanged_rows(views, rows, inverse, floats);
    if (!rows.empty() || bags.empty()) SOK_DISPATCH_AS("combine", checked, pool, rows, sources);
    if (!bags.empty()) SOK_DISPATCH(checked, combine_bags, bags, request.parts, data);
  });
}

extern "C" int sok_gather_combine(const sok_context* context, int32_t num_tables, const sok_columns* tables,
                                  int32_t num_lookups, const sok_lookup* lookups) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Columns> views = check_columns(checked, num_tables, tables);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kSlots, Output::kWritten);
    const cpu::RowsOfCall rows(checked, views, looks);
    SOK_DISPATCH_AS("gather_combine", checked, pool, looks, rows.sources());
  });
}
