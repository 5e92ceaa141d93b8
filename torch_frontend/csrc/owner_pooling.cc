// SPDX-License-Identifier: Apache-2.0
// Pooling at the owner: choose_pooling, route_bags, combine_bags, spread_bags.
#include "sok/owner_pooling.h"

#include <ATen/Functions.h>

#include "context.h"
#include "stages.h"
#include "status.h"

namespace sok_torch {
namespace {

int64_t parts_of(int64_t owner, int64_t num_ranks) { return owner < 0 ? num_ranks : 1; }

// Of all bags of a call and their parts.
struct Sizes {
  int64_t bags = 0;
  int64_t splits = 0;    // row splits of the parts
  int64_t elements = 0;  // of the sums of the parts
};

Sizes sizes_of(Lookups& lookups, const Placement& placement) {
  Sizes result;
  for (int32_t i = 0; i < lookups.size(); ++i) {
    const int64_t table = lookups[i].table, bags = lookups.num_bags(i);
    TORCH_CHECK_VALUE(table >= 0 && table < static_cast<int64_t>(placement.owners.size()), "lookup ", i,
                      " names table ", table, " of ", placement.owners.size());
    const int64_t parts = parts_of(placement.owners[table], placement.num_ranks);
    result.elements += parts * bags * placement.dimensions[table];
    result.splits += parts * (bags + 1);
    result.bags += bags;
  }
  return result;
}

}  // namespace

std::vector<int64_t> choose_pooling(const Placement& placement, const LookupArguments& arguments) {
  const std::vector<sok_placement> tables = placements_of(placement);
  Lookups lookups(arguments);
  if (arguments.keys.empty()) return {};
  std::vector<int32_t> pooled(arguments.keys.size());
  const Context context(arguments.keys[0].device());
  SOK_CALL(sok_choose_pooling(context.get(), static_cast<int32_t>(tables.size()), tables.data(), lookups.size(),
                              lookups.data(), pooled.data()));
  return {pooled.begin(), pooled.end()};
}

BagRouting route_bags(const Placement& placement, const LookupArguments& arguments) {
  TORCH_CHECK_VALUE(arguments.weights.empty(), "lookups with weights are not pooled at the owner");
  const c10::Device device = device_of(arguments.keys);
  const std::vector<sok_placement> tables = placements_of(placement);
  Lookups lookups(arguments);
  const Sizes sizes = sizes_of(lookups, placement);
  const at::TensorOptions int64 = at::TensorOptions().device(device).dtype(at::kLong);
  BagRouting result{at::empty({lookups.num_entries()}, int64), at::empty({placement.num_ranks, lookups.size()}, int64),
                    at::empty({sizes.splits}, int64), at::empty({sizes.bags}, int64.dtype(at::kFloat))};
  sok_bag_routing routing = SOK_BAG_ROUTING_INIT;
  routing.keys = view(result.keys, "keys");
  routing.counts = view(result.counts, "counts");
  routing.splits = view(result.splits, "splits");
  routing.scales = view(result.scales, "scales");
  const Context context(device, Earlier::kRaised);
  SOK_CALL(sok_route_bags(context.get(), static_cast<int32_t>(tables.size()), tables.data(), lookups.size(),
                          lookups.data(), &routing));
  return result;
}

std::vector<at::Tensor> combine_bags(const at::Tensor& sums, const Placement& placement,
                                     const LookupArguments& arguments, const at::Tensor& scales, bool concat) {
  const std::vector<sok_placement> tables = placements_of(placement);
  Lookups lookups(arguments);
  std::vector<at::Tensor> outputs = lookups.allocate_outputs(placement.dimensions, concat, sums.options());
  const Context context(sums.device());
  SOK_CALL(sok_combine_bags(context.get(), static_cast<int32_t>(tables.size()), tables.data(), lookups.size(),
                            lookups.data(), view(scales, "scales"), view(sums, "sums")));
  return outputs;
}

at::Tensor spread_bags(const OptionalTensors& output_gradients, const Placement& placement,
                       const LookupArguments& arguments, const at::Tensor& scales) {
  const std::vector<sok_placement> tables = placements_of(placement);
  Lookups lookups(arguments);
  const OutputGradients gradient_views(output_gradients, lookups);
  at::Tensor gradients = at::empty({sizes_of(lookups, placement).elements}, scales.options().dtype(at::kFloat));
  const Context context(scales.device());
  SOK_CALL(sok_spread_bags(context.get(), static_cast<int32_t>(tables.size()), tables.data(), lookups.size(),
                           lookups.data(), gradient_views.data(), view(scales, "scales"),
                           view(gradients, "gradients")));
  return gradients;
}

}  // namespace sok_torch
