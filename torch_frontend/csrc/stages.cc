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

}  // namespace

Routing route(const Placement& placement, const LookupArguments& arguments) {
  const c10::Device device = device_of(arguments.keys);
  Tables tables(placement);
  Lookups lookups(arguments);
  const int64_t n = lookups.num_entries();
  const at::TensorOptions int64 = at::TensorOptions().device(device).dtype(at::kLong);
  const at::TensorOptions int32 = int64.dtype(at::kInt);
  Routing result{at::empty({n}, int64), at::empty({placement.num_ranks, tables.size()}, int64), at::empty({n}, int64),
                 at::empty({n}, int32), at::empty({n + 1}, int32)};
  sok_routing routing = SOK_ROUTING_INIT;
  routing.keys = view(result.keys, "keys");
  routing.counts = view(result.counts, "counts");
  routing.inverse = view(result.inverse, "inverse");
  routing.order = view(result.order, "order");
  routing.unique_splits = view(result.unique_splits, "unique_splits");
  const Context context(device, Earlier::kRaised);
  SOK_CALL(sok_route(context.get(), tables.size(), tables.data(), lookups.size(), lookups.data(), &routing));
  return result;
}

at::Tensor locate(at::TensorList tables, const Placement& placement, at::IntArrayRef counts, const at::Tensor& keys) {
  num_elements(counts, placement);
  Tables views(placement, tables);
  at::Tensor slots = at::empty_like(keys);
  const Context context(keys.device());
  SOK_CALL(sok_locate(context.get(), views.size(), views.data(), static_cast<int32_t>(placement.num_ranks),
                      counts.data(), view(keys, "keys"), view(slots, "slots"), 0));
  return slots;
}

at::Tensor gather(at::TensorList tables, const Placement& placement, at::IntArrayRef counts, const at::Tensor& keys,
                  const at::Tensor& slots) {
  Tables views(placement, tables);
  at::Tensor rows = at::empty({num_elements(counts, placement)}, keys.options().dtype(at::kFloat));
  const Context context(keys.device());
  SOK_CALL(sok_gather(context.get(), views.size(), views.data(), static_cast<int32_t>(placement.num_ranks),
                      counts.data(), view(keys, "keys"), view(slots, "slots"), view(rows, "rows")));
  return rows;
}

std::vector<at::Tensor> combine(const at::Tensor& rows, const Placement& placement, const LookupArguments& arguments,
                                const at::Tensor& inverse, bool concat) {
  Tables tables(placement);
  Lookups lookups(arguments);
  std::vector<at::Tensor> outputs = lookups.allocate_outputs(placement.dimensions, concat, rows.options());
  const Context context(rows.device());
  SOK_CALL(sok_combine(context.get(), tables.size(), tables.data(), lookups.size(), lookups.data(),
                       view(inverse, "inverse"), view(rows, "rows")));
  return outputs;
}

at::Tensor spread(const OptionalTensors& output_gradients, const Placement& placement, const LookupArguments& arguments,
                  const Routing& routed, at::IntArrayRef counts) {
  Tables tables(placement);
  Lookups lookups(arguments);
  const OutputGradients gradient_views(output_gradients, lookups);
  at::Tensor gradients = at::empty({num_elements(counts, placement)}, routed.inverse.options().dtype(at::kFloat));
  sok_routing routing = SOK_ROUTING_INIT;
  routing.keys = view(routed.keys, "keys");
  routing.inverse = view(routed.inverse, "inverse");
  routing.order = view(routed.order, "order");
  routing.unique_splits = view(routed.unique_splits, "unique_splits");
  const Context context(routed.inverse.device());
  SOK_CALL(sok_spread(context.get(), tables.size(), tables.data(), lookups.size(), lookups.data(),
                      gradient_views.data(), &routing, counts.data(), view(gradients, "gradients")));
  return gradients;
}

}  // namespace sok_torch
