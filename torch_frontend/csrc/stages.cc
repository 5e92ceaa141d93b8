// SPDX-License-Identifier: Apache-2.0
// route, locate, gather, combine, spread.
#include "stages.h"

#include <ATen/Functions.h>

#include "context.h"
#include "sok/gradient.h"
#include "sok/lookup.h"
#include "status.h"

namespace sok_torch {
namespace {

// Elements of the rows that `counts` asks for.
int64_t num_elements(at::IntArrayRef counts, const Placement& placement) {
  const size_t num_tables = placement.dimensions.size();
  TORCH_CHECK_VALUE(counts.size() == placement.num_ranks * num_tables, "counts has ", counts.size(), " entries for ",
                    placement.num_ranks, " ranks and ", num_tables, " tables");
  int64_t result = 0;
  for (size_t i = 0; i < counts.size(); ++i) result += counts[i] * placement.dimensions[i % num_tables];
  return result;
}

// int64 numbers [first, first + size) of an array.
sok_tensor range(sok_tensor array, int64_t first, int64_t size) {
  array.data = static_cast<int64_t*>(array.data) + first;
  array.shape[0] = size;
  return array;
}

// What came from the ranks, one after another, as lookups.
std::vector<sok_lookup> parts_of(at::IntArrayRef part_tables, at::IntArrayRef key_counts, const sok_tensor& keys,
                                 const sok_tensor& slots) {
  TORCH_CHECK_VALUE(part_tables.size() == key_counts.size(), "each part needs its table and its number of keys");
  std::vector<sok_lookup> parts(part_tables.size(), SOK_LOOKUP_INIT);
  int64_t first = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i].table = static_cast<int32_t>(part_tables[i]);
    if (keys.rank == 1) parts[i].keys = range(keys, first, key_counts[i]);
    parts[i].slots = range(slots, first, key_counts[i]);
    first += key_counts[i];
  }
  TORCH_CHECK_VALUE(first == slots.shape[0], "counts of ", first, " keys for ", slots.shape[0], " slots");
  return parts;
}

}  // namespace

Routing route(const Placement& placement, const LookupArguments& arguments) {
  const c10::Device device = device_of(arguments.keys);
  const std::vector<sok_placement> tables = placements_of(placement);
  Lookups lookups(arguments);
  const int64_t n = lookups.num_entries();
  const at::TensorOptions int64 = at::TensorOptions().device(device).dtype(at::kLong);
  const at::TensorOptions int32 = int64.dtype(at::kInt);
  Routing result{at::empty({n}, int64), at::empty({placement.num_ranks, static_cast<int64_t>(tables.size())}, int64),
                 at::empty({n}, int64), at::empty({n}, int32), at::empty({n + 1}, int32)};
  sok_routing routing = SOK_ROUTING_INIT;
  routing.keys = view(result.keys, "keys");
  routing.counts = view(result.counts, "counts");
  routing.inverse = view(result.inverse, "inverse");
  routing.order = view(result.order, "order");
  routing.unique_splits = view(result.unique_splits, "unique_splits");
  const Context context(device, Earlier::kRaised);
  SOK_CALL(sok_route(context.get(), static_cast<int32_t>(tables.size()), tables.data(), lookups.size(), lookups.data(),
                     &routing));
  return result;
}

at::Tensor locate(const Placement& placement, at::IntArrayRef part_tables, at::IntArrayRef key_counts,
                  const at::Tensor& keys) {
  const std::vector<sok_placement> tables = placements_of(placement);
  at::Tensor slots = at::empty_like(keys);
  const std::vector<sok_lookup> parts = parts_of(part_tables, key_counts, view(keys, "keys"), view(slots, "slots"));
  const Context context(keys.device());
  SOK_CALL(sok_locate(context.get(), static_cast<int32_t>(tables.size()), tables.data(), nullptr,
                      static_cast<int32_t>(parts.size()), parts.data(), 0));
  return slots;
}

at::Tensor gather(at::TensorList tables, const Names& names, at::IntArrayRef part_tables, at::IntArrayRef key_counts,
                  at::IntArrayRef bag_counts, const at::Tensor& slots, const at::Tensor& splits) {
  const std::vector<sok_columns> columns = make_columns(tables, names);
  std::vector<sok_lookup> parts = parts_of(part_tables, key_counts, kAbsent, view(slots, "slots"));
  const auto num_rows = [&](size_t i) { return bag_counts.empty() ? key_counts[i] : bag_counts[i]; };
  int64_t elements = 0;
  for (size_t i = 0; i < parts.size(); ++i) elements += num_rows(i) * tables[part_tables[i]].size(1);
  at::Tensor rows = at::empty({elements}, slots.options().dtype(at::kFloat));
  float* row = rows.mutable_data_ptr<float>();
  int64_t split = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const int64_t dimension = tables[part_tables[i]].size(1);
    parts[i].output = {row, SOK_FLOAT32, 2, {num_rows(i), dimension}, 0};
    row += num_rows(i) * dimension;
    if (bag_counts.empty()) continue;
    parts[i].row_splits = range(view(splits, "splits"), split, bag_counts[i] + 1);
    split += bag_counts[i] + 1;
  }
  const Context context(slots.device());
  SOK_CALL(sok_gather_combine(context.get(), static_cast<int32_t>(columns.size()), columns.data(),
                              static_cast<int32_t>(parts.size()), parts.data()));
  return rows;
}

std::vector<at::Tensor> combine(const at::Tensor& rows, const Placement& placement, const LookupArguments& arguments,
                                const at::Tensor& inverse, bool concat) {
  const std::vector<sok_placement> tables = placements_of(placement);
  Lookups lookups(arguments);
  std::vector<at::Tensor> outputs = lookups.allocate_outputs(placement.dimensions, concat, rows.options());
  const Context context(rows.device());
  SOK_CALL(sok_combine(context.get(), static_cast<int32_t>(tables.size()), tables.data(), lookups.size(),
                       lookups.data(), view(inverse, "inverse"), view(rows, "rows")));
  return outputs;
}

at::Tensor spread(const OptionalTensors& output_gradients, const Placement& placement, const LookupArguments& arguments,
                  const Routing& routed, at::IntArrayRef counts) {
  const std::vector<sok_placement> tables = placements_of(placement);
  Lookups lookups(arguments);
  const OutputGradients gradient_views(output_gradients, lookups);
  at::Tensor gradients = at::empty({num_elements(counts, placement)}, routed.inverse.options().dtype(at::kFloat));
  sok_routing routing = SOK_ROUTING_INIT;
  routing.keys = view(routed.keys, "keys");
  routing.inverse = view(routed.inverse, "inverse");
  routing.order = view(routed.order, "order");
  routing.unique_splits = view(routed.unique_splits, "unique_splits");
  const Context context(routed.inverse.device());
  SOK_CALL(sok_spread(context.get(), static_cast<int32_t>(tables.size()), tables.data(), lookups.size(), lookups.data(),
                      gradient_views.data(), &routing, counts.data(), view(gradients, "gradients")));
  return gradients;
}

}  // namespace sok_torch
