// SPDX-License-Identifier: Apache-2.0
// Entry points of the forward stages (sok/lookup.h, sok/bags.h).
#include "api/dispatch.h"
#include "common/tensor.h"

namespace sok {
namespace {

Routing check_routing(const sok_routing* routing, int64_t entries, int32_t num_ranks, int64_t num_tables) {
  SOK_CHECK(routing != nullptr, "routing is NULL");
  SOK_CHECK(routing->struct_size == sizeof(sok_routing), "routing.struct_size is ", routing->struct_size, ", must be ",
            sizeof(sok_routing));
  const auto label = [](const char* field) { return Label{"routing", -1, field}; };
  Routing result;
  result.keys = checked_data<int64_t>(routing->keys, label("keys"), SOK_INT64, {entries});
  result.counts = checked_data<int64_t>(routing->counts, label("counts"), SOK_INT64, {num_ranks, num_tables});
  result.inverse = checked_data<int64_t>(routing->inverse, label("inverse"), SOK_INT64, {entries});
  result.order = checked_data<int32_t>(routing->order, label("order"), SOK_INT32, {entries});
  result.unique_splits =
      checked_data<int32_t>(routing->unique_splits, label("unique_splits"), SOK_INT32, {entries + 1});
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

extern "C" int sok_route(const sok_context* context, int32_t num_tables, const sok_table* tables, int32_t num_lookups,
                         const sok_lookup* lookups, const sok_routing* routing) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_tables(checked, num_tables, tables, Rows::kIgnored);
    const int32_t num_ranks = check_num_ranks(views);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kRead, Output::kIgnored);
    const Routing out = check_routing(routing, count_entries(looks), num_ranks, num_tables);
    refuse_dynamic(views, "route");
    SOK_DISPATCH(checked, route, views, looks, out);
  });
}

extern "C" int sok_locate(const sok_context* context, int32_t num_tables, const sok_table* tables, int32_t num_sources,
                          const int64_t* counts, sok_tensor keys, sok_tensor slots, uint32_t flags) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_tables(checked, num_tables, tables, Rows::kUsed);
    const Totals totals = check_counts(views, num_sources, counts);
    SOK_CHECK((flags & ~SOK_LOCATE_INSERT) == 0, "flags ", flags, " has unknown bits");
    const int64_t* keys_data = checked_data<const int64_t>(keys, {"keys"}, SOK_INT64, {totals.rows});
    int64_t* slots_data = checked_data<int64_t>(slots, {"slots"}, SOK_INT64, {totals.rows});
    refuse_dynamic(views, "locate");
    SOK_DISPATCH(checked, locate, views, num_sources, counts, keys_data, slots_data, flags);
  });
}

extern "C" int sok_gather(const sok_context* context, int32_t num_tables, const sok_table* tables, int32_t num_sources,
                          const int64_t* counts, sok_tensor keys, sok_tensor slots, sok_tensor rows) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_tables(checked, num_tables, tables, Rows::kUsed);
    const Totals totals = check_counts(views, num_sources, counts);
    // Static tables need no keys here, so a caller may leave them out.
    const int64_t* keys_data =
        is_absent(keys) ? nullptr : checked_data<const int64_t>(keys, {"keys"}, SOK_INT64, {totals.rows});
    const int64_t* slots_data = checked_data<const int64_t>(slots, {"slots"}, SOK_INT64, {totals.rows});
    const Floats row_view = check_floats(rows, {"rows"}, {totals.elements});
    if (row_view.dtype != SOK_FLOAT32) {
      for (const Table& table : views) {
        SOK_CHECK(table.weight.dtype == row_view.dtype, "rows is ", dtype_name(row_view.dtype), " but table '",
                  table.name, "' is ", dtype_name(table.weight.dtype),
                  ": rows must be float32 or the dtype of all tables of the call");
      }
    }
    refuse_dynamic(views, "gather");
    SOK_DISPATCH(checked, gather, views, num_sources, counts, keys_data, slots_data, row_view);
  });
}

extern "C" int sok_combine(const sok_context* context, int32_t num_tables, const sok_table* tables, int32_t num_lookups,
                           const sok_lookup* lookups, sok_tensor inverse, sok_tensor rows) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_tables(checked, num_tables, tables, Rows::kIgnored);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kCounted, Output::kWritten);
    const int64_t* inverse_data = checked_data<const int64_t>(inverse, {"inverse"}, SOK_INT64, {count_entries(looks)});
    const Floats row_view = check_floats(rows, {"rows"}, {kAnySize});
    SOK_DISPATCH(checked, combine, views, looks, inverse_data, row_view, rows.shape[0]);
  });
}

extern "C" int sok_gather_combine(const sok_context* context, int32_t num_tables, const sok_table* tables,
                                  int32_t num_lookups, const sok_lookup* lookups) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_tables(checked, num_tables, tables, Rows::kUsed);
    for (const Table& table : views) {
      SOK_CHECK(table.placement.num_ranks == 1, "table '", table.name, "' lies on ", table.placement.num_ranks,
                " ranks; gather_combine serves tables that are whole on one rank");
    }
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kRead, Output::kWritten);
    refuse_dynamic(views, "gather_combine");
    SOK_DISPATCH(checked, gather_combine, views, looks);
  });
}
