// SPDX-License-Identifier: Apache-2.0
// The stages between the exchanges of a call on several ranks (docs/ARCHITECTURE.md), on tensors of one device, CPU or
// CUDA. Who calls them is sharded_lookup.h. They throw ValueError for shapes that do not fit.
//   placement  the tables of the call; lookups: those that the stage is about
//   counts     keys by source rank, then table
// A `concat` output is one for all lookups, which holds theirs side by side.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ops.h"
#include "views.h"

namespace sok_torch {

struct Routing {
  at::Tensor keys;           // [n] int64, by rank, then table: the first sum(counts) are used
  at::Tensor counts;         // [num_ranks, tables] int64
  at::Tensor inverse;        // [n] int64
  at::Tensor order;          // [n] int32
  at::Tensor unique_splits;  // [n + 1] int32
};

// IndexError for a key outside its table.
Routing route(const Placement& placement, const LookupArguments& lookups);

// Of an owner. Parts: what came from each rank, by rank, then table or lookup, one after another; part_tables:
// positions of their tables; key_counts: keys of each. keys [sum(key_counts)] int64 as they came -> slots like keys
at::Tensor locate(const Placement& placement, at::IntArrayRef part_tables, at::IntArrayRef key_counts,
                  const at::Tensor& keys);

// tables: this rank's rows of the call's; slots: of the parts -> rows, 1-D float32, in the order of the slots. With
// bag_counts and splits [sum(bag_counts) + parts] int64: their sums, of each part [bags, dimension].
at::Tensor gather(at::TensorList tables, const Names& names, at::IntArrayRef part_tables, at::IntArrayRef key_counts,
                  at::IntArrayRef bag_counts, const at::Tensor& slots, const at::Tensor& splits);

// rows: the exchanged ones; inverse: of the routing -> [bags, dimension] float32 of each lookup
std::vector<at::Tensor> combine(const at::Tensor& rows, const Placement& placement, const LookupArguments& lookups,
                                const at::Tensor& inverse, bool concat);

// output_gradients: one [bags, dimension] or None a lookup; counts: of the routing -> gradients of the exchanged rows,
// 1-D float32
at::Tensor spread(const OptionalTensors& output_gradients, const Placement& placement, const LookupArguments& lookups,
                  const Routing& routing, at::IntArrayRef counts);

// rows, inverse: as combine had them -> one [n] float32 for each of the weights
std::vector<at::Tensor> weight_gradient_of_rows(const OptionalTensors& output_gradients, const Placement& placement,
                                                const LookupArguments& lookups, const at::Tensor& inverse,
                                                const at::Tensor& rows);

// Pooling at the owner (sok/owner_pooling.h): 1 for each lookup that is better pooled there, else 0.
std::vector<int64_t> choose_pooling(const Placement& placement, const LookupArguments& lookups);

struct BagRouting {
  at::Tensor keys;    // [n] int64
  at::Tensor counts;  // [num_ranks, lookups] int64
  at::Tensor splits;  // int64: for each rank, for each lookup whose table lives there, the row splits of its parts
  at::Tensor scales;  // [bags] float32
};

// Lookups without weights.
BagRouting route_bags(const Placement& placement, const LookupArguments& lookups);

// sums: the exchanged ones; scales: of the routing -> as combine
std::vector<at::Tensor> combine_bags(const at::Tensor& sums, const Placement& placement, const LookupArguments& lookups,
                                     const at::Tensor& scales, bool concat);

// As spread -> gradients of the exchanged sums, 1-D float32
at::Tensor spread_bags(const OptionalTensors& output_gradients, const Placement& placement,
                       const LookupArguments& lookups, const at::Tensor& scales);

}  // namespace sok_torch
