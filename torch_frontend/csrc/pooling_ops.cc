// SPDX-License-Identifier: Apache-2.0
// Pooling at the owner: choose_pooling, route_bags, gather_bags, combine_bags, spread_bags.
#include <ATen/Functions.h>

#include "context.h"
#include "ops.h"
#include "sok/owner_pooling.h"
#include "status.h"
#include "views.h"

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

std::vector<int64_t> choose_pooling(const Names& names, at::IntArrayRef owners, at::IntArrayRef num_rows,
                                    at::IntArrayRef dimensions, int64_t num_ranks, int64_t rank, at::TensorList keys,
                                    at::IntArrayRef key_tables, at::IntArrayRef combiners, at::TensorList row_splits,
                                    at::IntArrayRef bagged, at::TensorList weights, at::IntArrayRef weighted) {
  Tables tables({names, owners, num_rows, dimensions, num_ranks, rank});
  Lookups lookups({keys, key_tables, combiners, row_splits, bagged, weights, weighted});
  if (keys.empty()) return {};
  std::vector<int32_t> pooled(keys.size());
  const Context context(keys[0].device());
  check(sok_choose_pooling(context.get(), tables.size(), tables.data(), lookups.size(), lookups.data(), pooled.data()));
  return {pooled.begin(), pooled.end()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> route_bags(
    const Names& names, at::IntArrayRef owners, at::IntArrayRef num_rows, at::IntArrayRef dimensions, int64_t num_ranks,
    int64_t rank, at::TensorList keys, at::IntArrayRef key_tables, at::IntArrayRef combiners, at::TensorList row_splits,
    at::IntArrayRef bagged, at::TensorList weights, at::IntArrayRef weighted) {
  TORCH_CHECK_VALUE(!keys.empty(), "a call needs at least one lookup");
  TORCH_CHECK_VALUE(weights.empty(), "lookups with weights are not pooled at the owner");
  const c10::Device device = keys[0].device();
  for (const at::Tensor& tensor : keys) {
    TORCH_CHECK_VALUE(tensor.device() == device, "ids must be on one device, not on ", device, " and ",
                      tensor.device());
  }
  const Placement placement{names, owners, num_rows, dimensions, num_ranks, rank};
  Tables tables(placement);
  Lookups lookups({keys, key_tables, combiners, row_splits, bagged, weights, weighted});
  const Sizes sizes = sizes_of(lookups, placement);
  const at::TensorOptions int64 = keys[0].options().dtype(at::kLong);
  at::Tensor routed = at::empty({lookups.num_entries()}, int64);
  at::Tensor counts = at::empty({num_ranks, lookups.size()}, int64);
  at::Tensor splits = at::empty({sizes.splits}, int64);
  at::Tensor scales = at::empty({sizes.bags}, int64.dtype(at::kFloat));
  sok_bag_routing routing = SOK_BAG_ROUTING_INIT;
  routing.keys = view(routed, "keys");
  routing.counts = view(counts, "counts");
  routing.splits = view(splits, "splits");
  routing.scales = view(scales, "scales");
  const Context context(device, Earlier::kRaised);
  check(sok_route_bags(context.get(), tables.size(), tables.data(), lookups.size(), lookups.data(), &routing));
  return {routed, counts, splits, scales};
}

at::Tensor gather_bags(at::TensorList tables, const Names& names, at::IntArrayRef owners, at::IntArrayRef num_rows,
                       int64_t num_ranks, int64_t rank, at::IntArrayRef part_tables, at::IntArrayRef key_counts,
                       at::IntArrayRef bag_counts, const at::Tensor& slots, const at::Tensor& splits) {
  const size_t num_parts = part_tables.size();
  TORCH_CHECK_VALUE(key_counts.size() == num_parts && bag_counts.size() == num_parts,
                    "part_tables, key_counts and bag_counts must have equal lengths");
  const std::vector<int64_t> dimensions = dimensions_of(tables);
  Tables views({names, owners, num_rows, dimensions, num_ranks, rank}, tables);
  std::vector<int32_t> numbers;
  int64_t elements = 0;
  for (size_t i = 0; i < num_parts; ++i) {
    const int64_t table = part_tables[i];
    TORCH_CHECK_VALUE(table >= 0 && table < static_cast<int64_t>(tables.size()), "part ", i, " names table ", table,
                      " of ", tables.size());
    TORCH_CHECK_VALUE(owners[table] < 0 || owners[table] == rank, "part ", i, " names table ", names.get(table),
                      ", which lives on rank ", owners[table]);
    TORCH_CHECK_VALUE(bag_counts[i] >= 0, "bag_counts has a negative entry, ", bag_counts[i]);
    elements += bag_counts[i] * dimensions[table];
    numbers.push_back(static_cast<int32_t>(table));
  }
  at::Tensor sums = at::empty({elements}, slots.options().dtype(at::kFloat));
  const Context context(slots.device());
  // Ranks may differ in what they have pooled here: to the core all parts are lookups of one source.
  check(sok_gather_bags(context.get(), views.size(), views.data(), static_cast<int32_t>(num_parts), numbers.data(), 1,
                        key_counts.data(), bag_counts.data(), view(slots, "slots"), view(splits, "splits"), kAbsent,
                        view(sums, "sums")));
  return sums;
}

std::vector<at::Tensor> combine_bags(const at::Tensor& sums, const Names& names, at::IntArrayRef owners,
                                     at::IntArrayRef num_rows, at::IntArrayRef dimensions, int64_t num_ranks,
                                     int64_t rank, at::TensorList keys, at::IntArrayRef key_tables,
                                     at::IntArrayRef combiners, at::TensorList row_splits, at::IntArrayRef bagged,
                                     at::TensorList weights, at::IntArrayRef weighted, const at::Tensor& scales,
                                     bool concat) {
  Tables tables({names, owners, num_rows, dimensions, num_ranks, rank});
  Lookups lookups({keys, key_tables, combiners, row_splits, bagged, weights, weighted});
  std::vector<at::Tensor> outputs = lookups.allocate_outputs(dimensions, concat, sums.options());
  const Context context(sums.device());
  check(sok_combine_bags(context.get(), tables.size(), tables.data(), lookups.size(), lookups.data(),
                         view(scales, "scales"), view(sums, "sums")));
  return outputs;
}

at::Tensor spread_bags(const OptionalTensors& output_gradients, const Names& names, at::IntArrayRef owners,
                       at::IntArrayRef num_rows, at::IntArrayRef dimensions, int64_t num_ranks, int64_t rank,
                       at::TensorList keys, at::IntArrayRef key_tables, at::IntArrayRef combiners,
                       at::TensorList row_splits, at::IntArrayRef bagged, at::TensorList weights,
                       at::IntArrayRef weighted, const at::Tensor& scales) {
  const Placement placement{names, owners, num_rows, dimensions, num_ranks, rank};
  Tables tables(placement);
  Lookups lookups({keys, key_tables, combiners, row_splits, bagged, weights, weighted});
  std::vector<at::Tensor> owned;
  const std::vector<sok_tensor> gradient_views = views(output_gradients, "output gradient", &owned);
  TORCH_CHECK_VALUE(static_cast<int32_t>(gradient_views.size()) == lookups.size(),
                    "spread_bags needs one output gradient (or None) a lookup");
  at::Tensor gradients = at::empty({sizes_of(lookups, placement).elements}, scales.options().dtype(at::kFloat));
  const Context context(scales.device());
  check(sok_spread_bags(context.get(), tables.size(), tables.data(), lookups.size(), lookups.data(),
                        gradient_views.data(), view(scales, "scales"), view(gradients, "gradients")));
  return gradients;
}

}  // namespace sok_torch
