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

// call(context, lookups, views of the output gradients, views of the results) fills in the results.
template <typename Call>
std::vector<at::Tensor> weight_gradient(const OptionalTensors& output_gradients, const LookupArguments& arguments,
                                        Call&& call) {
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
  call(context.get(), lookups, gradient_views.data(), weight_views.data());
  return results;
}

}  // namespace

std::vector<at::Tensor> weight_gradient(const OptionalTensors& output_gradients, at::TensorList tables,
                                        const Names& names, at::IntArrayRef /*owners*/, at::IntArrayRef /*num_rows*/,
                                        at::TensorList keys, at::IntArrayRef key_tables, at::IntArrayRef combiners,
                                        at::TensorList row_splits, at::IntArrayRef bagged, at::TensorList weights,
                                        at::IntArrayRef weighted) {
  const std::vector<sok_columns> columns = make_columns(tables, names);
  return weight_gradient(
      output_gradients, {keys, key_tables, combiners, row_splits, bagged, weights, weighted},
      [&](const sok_context* context, const Lookups& lookups, const sok_tensor* outputs, const sok_tensor* results) {
        SOK_CALL(sok_weight_gradient(context, static_cast<int32_t>(columns.size()), columns.data(), lookups.size(),
                                     lookups.data(), outputs, results));
      });
}

std::vector<at::Tensor> weight_gradient_of_rows(const OptionalTensors& output_gradients, const Placement& placement,
                                                const LookupArguments& arguments, const at::Tensor& inverse,
                                                const at::Tensor& rows) {
  const std::vector<sok_placement> tables = placements_of(placement);
  return weight_gradient(
      output_gradients, arguments,
      [&](const sok_context* context, const Lookups& lookups, const sok_tensor* outputs, const sok_tensor* results) {
        SOK_CALL(sok_weight_gradient_of_rows(context, static_cast<int32_t>(tables.size()), tables.data(),
                                             lookups.size(), lookups.data(), outputs, view(inverse, "inverse"),
                                             view(rows, "rows"), results));
      });
}

}  // namespace sok_torch
