// SPDX-License-Identifier: Apache-2.0
// Entry points of the backward stages (sok/gradient.h).
#include "api/dispatch.h"
#include "common/tensor.h"

using namespace sok;  // NOLINT: entry points only

extern "C" int sok_spread(const sok_context* context, int32_t num_tables, const sok_table* tables, int32_t num_lookups,
                          const sok_lookup* lookups, const sok_tensor* output_gradients, const sok_routing* routing,
                          const int64_t* counts, sok_tensor gradients) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_tables(checked, num_tables, tables, Rows::kIgnored);
    const int32_t num_ranks = check_num_ranks(views);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kCounted, Output::kIgnored);
    const std::vector<Vectors> outputs = check_output_gradients(views, looks, output_gradients);
    const Totals totals = check_counts(views, num_ranks, counts);
    const int64_t entries = count_entries(looks);
    SOK_CHECK(totals.rows <= entries, "counts has ", totals.rows, " unique keys, more than the ", entries,
              " entries of the lookups");
    SOK_CHECK(routing != nullptr, "routing is NULL");
    SOK_CHECK(routing->struct_size == sizeof(sok_routing), "routing.struct_size is ", routing->struct_size,
              ", must be ", sizeof(sok_routing));
    const int32_t* order = checked_data<const int32_t>(routing->order, {"routing", -1, "order"}, SOK_INT32, {entries});
    const int32_t* unique_splits =
        checked_data<const int32_t>(routing->unique_splits, {"routing", -1, "unique_splits"}, SOK_INT32, {entries + 1});
    float* out = checked_data<float>(gradients, {"gradients"}, SOK_FLOAT32, {totals.elements});
    SOK_DISPATCH(checked, spread, views, looks, outputs, counts, order, unique_splits, out);
  });
}

extern "C" int sok_weight_gradient(const sok_context* context, int32_t num_tables, const sok_table* tables,
                                   int32_t num_lookups, const sok_lookup* lookups, const sok_tensor* output_gradients,
                                   sok_tensor inverse, sok_tensor rows, const sok_tensor* weight_gradients) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    SOK_CHECK(is_absent(inverse) == is_absent(rows), "inverse and rows must both be given or both be absent");
    const bool from_tables = is_absent(inverse);
    const std::vector<Table> views =
        check_tables(checked, num_tables, tables, from_tables ? Rows::kUsed : Rows::kIgnored);
    const std::vector<Lookup> looks =
        check_lookups(views, num_lookups, lookups, from_tables ? Keys::kRead : Keys::kCounted, Output::kIgnored);
    const std::vector<Vectors> outputs = check_output_gradients(views, looks, output_gradients);
    SOK_CHECK(looks.empty() || weight_gradients != nullptr, "weight_gradients is NULL");
    std::vector<float*> results(looks.size());
    for (size_t i = 0; i < looks.size(); ++i) {
      if (is_absent(weight_gradients[i])) continue;
      const Table& table = views[static_cast<size_t>(looks[i].table)];
      results[i] =
          checked_data<float>(weight_gradients[i], {"weight_gradients", static_cast<int64_t>(i), nullptr, table.name},
                              SOK_FLOAT32, {looks[i].keys.size});
    }
    const int64_t* inverse_data = nullptr;
    Floats row_view;
    if (from_tables) {
      for (const Table& table : views) {
        SOK_CHECK_STATUS(SOK_UNIMPLEMENTED, !table.dynamic, "table '", table.name,
                         "': weight_gradient does not read dynamic tables in this version");
        SOK_CHECK(table.placement.num_ranks == 1, "table '", table.name, "' lies on ", table.placement.num_ranks,
                  " ranks; weight_gradient reads tables that are whole on one rank, else give inverse and rows");
      }
    } else {
      inverse_data = checked_data<const int64_t>(inverse, {"inverse"}, SOK_INT64, {count_entries(looks)});
      row_view = check_floats(rows, {"rows"}, {kAnySize});
    }
    SOK_DISPATCH(checked, weight_gradient, views, looks, outputs, inverse_data, row_view,
                 from_tables ? 0 : rows.shape[0], results);
  });
}

extern "C" int sok_reduce(const sok_context* context, const sok_table* table, int32_t num_gradients,
                          const sok_gradient* gradients, sok_tensor slots, sok_tensor values, sok_tensor count) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const Table view = check_table(checked, table, Rows::kUsed);
    const std::vector<Gradient> parts = check_gradients(view, num_gradients, gradients);
    int64_t entries = 0;
    for (const Gradient& part : parts) entries += part.slots.size;
    int64_t* slots_data = checked_data<int64_t>(slots, {"slots"}, SOK_INT64, {entries});
    float* values_data = checked_data<float>(values, {"values"}, SOK_FLOAT32, {entries, view.dimension});
    int64_t* count_data = checked_data<int64_t>(count, {"count"}, SOK_INT64, {1});
    const StageRange range("reduce");
#ifdef SOK_WITH_CUDA
    if (checked.device.type == SOK_CUDA) {
      cuda::reduce(checked, view, parts, slots_data, values_data, count_data);
      return;
    }
#endif
    require_cpu(checked, "reduce");
    *count_data = cpu::reduce(checked, view, parts, slots_data, values_data);
  });
}

extern "C" int sok_apply(const sok_context* context, int32_t num_updates, const sok_update* updates) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Update> views = check_updates(checked, num_updates, updates);
    SOK_DISPATCH(checked, apply, views);
  });
}

extern "C" int sok_check_apply(const sok_context* context, int32_t num_updates, const sok_update* updates) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Update> views = check_updates(checked, num_updates, updates);
    if (checked.device.type == SOK_CPU) cpu::check_apply(checked, views);
  });
}
