// SPDX-License-Identifier: Apache-2.0
// The op weight_gradient.
#include "context.h"
#include "ops.h"
#include "sok/gradient.h"
#include "status.h"
#include "views.h"

namespace sok_torch {

std::vector<at::Tensor> weight_gradient(const OptionalTensors& output_gradients, at::TensorList tables,
                                        const Names& names, at::TensorList keys, at::IntArrayRef key_tables,
                                        at::IntArrayRef combiners, at::TensorList row_splits, at::IntArrayRef bagged,
                                        at::TensorList weights, at::IntArrayRef weighted, at::IntArrayRef generations,
                                        at::IntArrayRef members) {
  const std::vector<sok_columns> columns = make_columns(tables, names);
  Lookups lookups({keys, key_tables, combiners, row_splits, bagged, weights, weighted});
  lookups.set_generations(generations);
  lookups.set_members(members, nullptr);
  const OutputGradients given(output_gradients, lookups);
  WeightGradients wanted(weights, weighted, lookups);
  if (weights.empty()) return {};
  const Context context(weights[0].device());
  SOK_CALL(sok_weight_gradient(context.get(), static_cast<int32_t>(columns.size()), columns.data(), lookups.size(),
                               lookups.data(), given.data(), wanted.views.data()));
  return std::move(wanted.results);
}

}  // namespace sok_torch
