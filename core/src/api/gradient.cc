// SPDX-License-Identifier: Apache-2.0
// Entry points of the backward stages (sok/gradient.h).
#include <algorithm>
#include <numeric>

#include "api/dispatch.h"
#include "common/messages.h"
#include "common/tensor.h"
#include "cpu/rows_of_call.h"
#include "table/dynamic_table.h"

namespace sok {
namespace {

// nullptr for a lookup whose weights have no gradient that is wanted.
std::vector<float*> check_weight_gradients(const std::vector<Lookup>& lookups, const sok_tensor* weight_gradients) {
  SOK_CHECK(lookups.empty() || weight_gradients != nullptr, "weight_gradients is NULL");
  std::vector<float*> results(lookups.size());
  for (size_t i = 0; i < lookups.size(); ++i) {
    if (is_absent(weight_gradients[i])) continue;
    const Label label{"weight_gradients", static_cast<int64_t>(i), nullptr, lookups[i].id.name};
    results[i] = checked_data<float>(weight_gradients[i], label, SOK_FLOAT32, {lookups[i].keys.size});
    SOK_CHECK(lookups[i].weights != nullptr || lookups[i].keys.size == 0, label,
              " is wanted but the lookup has no weights");
  }
  return results;
}

void check_generations(const sok_context& context, const Columns& table, const std::vector<Gradient>& gradients) {
  if (table.since == nullptr) return;
  std::vector<Gradient> older;
  for (Gradient summand : gradients) {
    if (table.owner != nullptr) summand.generation = table.owner->numbered_now(summand.generation);
    if (summand.generation < table.freed) older.push_back(summand);  // a slot of it may have lost its key
  }
  if (!older.empty()) SOK_DISPATCH(context, check_generations, table, older);
}

// The same for slots whose rows are read once more.
void check_generations(const sok_context& context, const std::vector<Columns>& tables,
                       const std::vector<Lookup>& lookups) {
  for (const Lookup& lookup : lookups) {
    if (lookup.weights == nullptr) continue;
    Gradient slots;
    slots.slots = lookup.keys;
    slots.generation = lookup.generation;
    check_generations(context, tables[static_cast<size_t>(lookup.table)], {slots});
  }
}

}  // namespace
}  // namespace sok

using namespace sok;  // NOLINT: entry points only

extern "C" int sok_spread(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                          int32_t num_lookups, const sok_lookup* lookups, const sok_tensor* output_gradients,
                          const sok_messages* messages, const sok_routing* routing, sok_tensor gradients) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_placements(checked, num_tables, tables);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kCounted, Output::kIgnored);
    const std::vector<Vectors> outputs = check_output_gradients(looks, output_gradients);
    SOK_CHECK(messages != nullptr, "messages is NULL");
    const Request request = read_request(views, looks, messages);
    const std::vector<Lookup>&rows = request.lookups.at_requester, &bags = request.lookups.at_owner;
    const int64_t entries = count_entries(rows);
    const int64_t uniques = std::accumulate(request.counts.begin(), request.counts.end(), int64_t{0});
    SOK_CHECK(uniques <= entries, "counts has ", uniques, " unique keys, more than the ", entries,
              " entries of the lookups");
    SOK_CHECK(routing != nullptr, "routing is NULL");
    SOK_CHECK(routing->struct_size == sizeof(sok_routing), "routing.struct_size is ", routing->struct_size,
              ", must be ", sizeof(sok_routing));
    const int32_t* order = checked_data<const int32_t>(routing->order, {"routing", -1, "order"}, SOK_INT32, {entries});
    const int32_t* unique_splits =
        checked_data<const int32_t>(routing->unique_splits, {"routing", -1, "unique_splits"}, SOK_INT32, {entries + 1});
    float* out = checked_data<float>(gradients, {"gradients"}, SOK_FLOAT32, {request.parts.num_elements()});
    if (!rows.empty() || bags.empty()) {
      const UniqueRows unique = {request.counts.data(), request.parts.sums().data(), order, unique_splits};
      SOK_DISPATCH(checked, spread, views, rows, select(outputs, rows), unique, out);
    }
    if (!bags.empty()) SOK_DISPATCH(checked, spread_bags, bags, request.parts, select(outputs, bags), out);
  });
}

extern "C" int sok_weight_gradient(const sok_context* context, int32_t num_tables, const sok_columns* tables,
                                   int32_t num_lookups, const sok_lookup* lookups, const sok_tensor* output_gradients,
                                   const sok_tensor* weight_gradients) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Columns> views = check_columns(checked, num_tables, tables);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kSlots, Output::kIgnored);
    const std::vector<Vectors> outputs = check_output_gradients(looks, output_gradients);
    const std::vector<float*> results = check_weight_gradients(looks, weight_gradients);
    check_generations(checked, views, looks);
    const cpu::RowsOfCall rows(checked, views, looks);
    SOK_DISPATCH(checked, weight_gradient, looks, rows.sources(), outputs, results);
  });
}

extern "C" int sok_weight_gradient_of_rows(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                                           int32_t num_lookups, const sok_lookup* lookups,
                                           const sok_tensor* output_gradients, const sok_messages* messages,
                                           sok_tensor inverse, sok_tensor floats, const sok_tensor* weight_gradients) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_placements(checked, num_tables, tables);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kCounted, Output::kIgnored);
    const std::vector<Vectors> outputs = check_output_gradients(looks, output_gradients);
    const std::vector<float*> results = check_weight_gradients(looks, weight_gradients);
    const Request request = read_request(views, looks, messages);
    const std::vector<Lookup>& rows = request.lookups.at_requester;
    SOK_DISPATCH(checked, weight_gradient, rows, check_exchanged_rows(views, rows, inverse, floats),
                 select(outputs, rows), select(results, rows));
  });
}

extern "C" int sok_reduce(const sok_context* context, const sok_columns* table, int32_t num_gradients,
                          const sok_gradient* gradients, sok_tensor slots, sok_tensor values, sok_tensor count) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const Columns view = check_columns(checked, table);
    const std::vector<Gradient> summands = check_gradients(view, num_gradients, gradients);
    int64_t entries = 0;
    for (const Gradient& summand : summands) entries += summand.slots.size;
    int64_t* slots_data = checked_data<int64_t>(slots, {"slots"}, SOK_INT64, {entries});
    float* values_data = checked_data<float>(values, {"values"}, SOK_FLOAT32, {entries, view.dimension});
    int64_t* count_data = checked_data<int64_t>(count, {"count"}, SOK_INT64, {1});
    check_generations(checked, view, summands);
    const StageRange range("reduce");
#ifdef SOK_WITH_CUDA
    if (checked.device.type == SOK_CUDA) {
      cuda::reduce(checked, view, summands, slots_data, values_data, count_data);
      return;
    }
#endif
    require_cpu(checked, "reduce");
    *count_data = cpu::reduce(checked, view, summands, slots_data, values_data);
  });
}

extern "C" int sok_apply(const sok_context* context, int32_t num_updates, const sok_update* updates, sok_agree agree,
                         void* opaque) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Update> views = check_updates(checked, num_updates, updates);
    for (const Update& view : views) check_generations(checked, view.table, view.gradients);
    SOK_DISPATCH(checked, apply, views, {agree, opaque});
    for (const Update& view : views) {
      if (view.table.owner != nullptr) view.table.owner->end_step();
    }
  });
}
