// SPDX-License-Identifier: Apache-2.0
// Forward stages: route, locate, gather, combine, gather_combine.
#include <ATen/Functions.h>

#include "context.h"
#include "ops.h"
#include "sok/lookup.h"
#include "status.h"
#include "views.h"

namespace sok_torch {
namespace {

c10::Device device_of(at::TensorList tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), "a call needs at least one table and one lookup");
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.device() == tensors[0].device(), "tables and ids must be on one device, not on ",
                      tensors[0].device(), " and ", tensor.device());
  }
  return tensors[0].device();
}

// Elements of the rows that `counts` [num_ranks, tables] asks for.
int64_t num_elements(at::IntArrayRef counts, at::IntArrayRef dimensions, int64_t num_ranks) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(counts.size()) == num_ranks * static_cast<int64_t>(dimensions.size()),
                    "counts has ", counts.size(), " entries for ", num_ranks, " ranks and ", dimensions.size(),
                    " tables");
  int64_t result = 0;
  for (size_t i = 0; i < counts.size(); ++i) result += counts[i] * dimensions[i % dimensions.size()];
  return result;
}

}  // namespace

std::vector<at::Tensor> gather_combine(at::TensorList tables, const Names& names, at::IntArrayRef owners,
                                       at::IntArrayRef num_rows, at::TensorList keys, at::IntArrayRef key_tables,
                                       at::IntArrayRef combiners, at::TensorList row_splits, at::IntArrayRef bagged,
                                       at::TensorList weights, at::IntArrayRef weighted, bool concat) {
  const c10::Device device = device_of(tables);
  TORCH_CHECK_VALUE(device_of(keys) == device, "tables are on ", device, " and ids on ", keys[0].device());
  const std::vector<int64_t> dimensions = dimensions_of(tables);
  Tables views({names, owners, num_rows, dimensions, 1, 0}, tables);
  Lookups lookups({keys, key_tables, combiners, row_splits, bagged, weights, weighted});
  std::vector<at::Tensor> outputs = lookups.allocate_outputs(dimensions, concat, tables[0].options());
  const Context context(device, Earlier::kRaised);
  check(sok_gather_combine(context.get(), views.size(), views.data(), lookups.size(), lookups.data()));
  return outputs;
}

bool plain_pairs(at::TensorList keys, at::TensorList row_splits, at::Device device) {
  const auto plain = [device](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && !tensor.is_nested() && tensor.dim() == 1 && tensor.device() == device;
  };
  for (const at::Tensor& tensor : keys) {
    if (!plain(tensor) || (tensor.scalar_type() != at::kLong && tensor.scalar_type() != at::kInt)) return false;
  }
  for (const at::Tensor& tensor : row_splits) {
    if (!plain(tensor) || tensor.scalar_type() != at::kLong || tensor.size(0) == 0) return false;
  }
  return true;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> route(
    const Names& names, at::IntArrayRef owners, at::IntArrayRef num_rows, at::IntArrayRef dimensions, int64_t num_ranks,
    int64_t rank, at::TensorList keys, at::IntArrayRef key_tables, at::IntArrayRef combiners, at::TensorList row_splits,
    at::IntArrayRef bagged, at::TensorList weights, at::IntArrayRef weighted) {
  const c10::Device device = device_of(keys);
  Tables tables({names, owners, num_rows, dimensions, num_ranks, rank});
  Lookups lookups({keys, key_tables, combiners, row_splits, bagged, weights, weighted});
  const int64_t n = lookups.num_entries();
  const at::TensorOptions int64 = at::TensorOptions().device(device).dtype(at::kLong);
  const at::TensorOptions int32 = int64.dtype(at::kInt);
  at::Tensor unique = at::empty({n}, int64);
  at::Tensor counts = at::empty({num_ranks, tables.size()}, int64);
  at::Tensor inverse = at::empty({n}, int64);
  at::Tensor order = at::empty({n}, int32);
  at::Tensor unique_splits = at::empty({n + 1}, int32);
  sok_routing routing = SOK_ROUTING_INIT;
  routing.keys = view(unique, "keys");
  routing.counts = view(counts, "counts");
  routing.inverse = view(inverse, "inverse");
  routing.order = view(order, "order");
  routing.unique_splits = view(unique_splits, "unique_splits");
  const Context context(device, Earlier::kRaised);
  check(sok_route(context.get(), tables.size(), tables.data(), lookups.size(), lookups.data(), &routing));
  return {unique, counts, inverse, order, unique_splits};
}

at::Tensor locate(at::TensorList tables, const Names& names, at::IntArrayRef owners, at::IntArrayRef num_rows,
                  int64_t num_ranks, int64_t rank, at::IntArrayRef counts, const at::Tensor& keys) {
  const std::vector<int64_t> dimensions = dimensions_of(tables);
  num_elements(counts, dimensions, num_ranks);
  Tables views({names, owners, num_rows, dimensions, num_ranks, rank}, tables);
  at::Tensor slots = at::empty_like(keys);
  const Context context(keys.device());
  check(sok_locate(context.get(), views.size(), views.data(), static_cast<int32_t>(num_ranks), counts.data(),
                   view(keys, "keys"), view(slots, "slots"), 0));
  return slots;
}

at::Tensor gather(at::TensorList tables, const Names& names, at::IntArrayRef owners, at::IntArrayRef num_rows,
                  int64_t num_ranks, int64_t rank, at::IntArrayRef counts, const at::Tensor& keys,
                  const at::Tensor& slots) {
  const std::vector<int64_t> dimensions = dimensions_of(tables);
  Tables views({names, owners, num_rows, dimensions, num_ranks, rank}, tables);
  at::Tensor rows = at::empty({num_elements(counts, dimensions, num_ranks)}, keys.options().dtype(at::kFloat));
  const Context context(keys.device());
  check(sok_gather(context.get(), views.size(), views.data(), static_cast<int32_t>(num_ranks), counts.data(),
                   view(keys, "keys"), view(slots, "slots"), view(rows, "rows")));
  return rows;
}

std::vector<at::Tensor> combine(const at::Tensor& rows, const Names& names, at::IntArrayRef owners,
                                at::IntArrayRef num_rows, at::IntArrayRef dimensions, int64_t num_ranks, int64_t rank,
                                at::TensorList keys, at::IntArrayRef key_tables, at::IntArrayRef combiners,
                                at::TensorList row_splits, at::IntArrayRef bagged, at::TensorList weights,
                                at::IntArrayRef weighted, const at::Tensor& /*routed_keys*/, at::IntArrayRef /*counts*/,
                                const at::Tensor& inverse, const at::Tensor& /*order*/,
                                const at::Tensor& /*unique_splits*/, bool concat) {
  Tables tables({names, owners, num_rows, dimensions, num_ranks, rank});
  Lookups lookups({keys, key_tables, combiners, row_splits, bagged, weights, weighted});
  std::vector<at::Tensor> outputs = lookups.allocate_outputs(dimensions, concat, rows.options());
  const Context context(rows.device());
  check(sok_combine(context.get(), tables.size(), tables.data(), lookups.size(), lookups.data(),
                    view(inverse, "inverse"), view(rows, "rows")));
  return outputs;
}

}  // namespace sok_torch
