// SPDX-License-Identifier: Apache-2.0
// The op weight_gradient and the stage weight_gradient_of_rows.
#include <ATen/Functions.h>

#include "context.h"
#include "ops.h"
#include "sok/gradient.h"
#include "stages.h"
#include "status.h"
#include "views.h"

namespace sok_torch {
namespace {

// inverse, rows: of combine; absent: rows are read from the tables.
std::vector<at::Tensor> weight_gradient(const OptionalTensors& output_gradients, const Tables& tables,
                                        const LookupArguments& arguments, const sok_tensor& inverse,
                                        const sok_tensor& rows) {
  Lookups lookups(arguments);
  const OutputGradients gradient_views(output_gradients, lookups);
  const at::TensorList weights = arguments.weights;
  std::vector<sok_tensor> weight_views(lookups.size(), kAbsent);
  std::vector<at::Tensor> results;
  results.reserve(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    results.push_back(at::empty(weights[i].sizes(), weights[i].options().requires_grad(false)));
    weight_views.at(arguments.weighted[i]) = view(results.back(), "weight gradient");
  }
  if (results.empty()) return results;
  const Context context(weights[0].device());
  SOK_CALL(sok_weight_gradient(context.get(), tables.size(), tables.data(), lookups.size(), lookups.data(),
                               gradient_views.data(), inverse, rows, weight_views.data()));
  return results;
}

}  // namespace

std::vector<at::Tensor> weight_gradient(const OptionalTensors& output_gradients, at::TensorList tables,
                                        const Names& names, at::IntArrayRef owners, at::IntArrayRef num_rows,
                                        at::TensorList keys, at::IntArrayRef key_tables, at::IntArrayRef combiners,
                                        at::TensorList row_splits, at::IntArrayRef bagged, at::TensorList weights,
                                        at::IntArrayRef weighted) {
  const std::vector<int64_t> dimensions = dimensions_of(tables);
  return weight_gradient(output_gradients, Tables({names, owners, num_rows, dimensions, 1, 0}, tables),
                         {keys, key_tables, combiners, row_splits, bagged, weights, weighted}, kAbsent, kAbsent);
}

std::vector<at::Tensor> weight_gradient_of_rows(const OptionalTensors& output_gradients, const Placement& placement,
                                                const LookupArguments& lookups, const at::Tensor& inverse,
                                                const at::Tensor& rows) {
  return weight_gradient(output_gradients, Tables(placement), lookups, view(inverse, "inverse"), view(rows, "rows"));
}

}  // namespace sok_torch
