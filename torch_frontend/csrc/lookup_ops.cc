// SPDX-License-Identifier: Apache-2.0
// The ops gather_combine and plain_pairs.
#include <ATen/Functions.h>

#include "context.h"
#include "ops.h"
#include "sok/lookup.h"
#include "status.h"
#include "views.h"

namespace sok_torch {

std::vector<at::Tensor> gather_combine(at::TensorList tables, const Names& names, at::TensorList keys,
                                       at::IntArrayRef key_tables, at::IntArrayRef combiners, at::TensorList row_splits,
                                       at::IntArrayRef bagged, at::TensorList weights, at::IntArrayRef weighted,
                                       bool concat) {
  const c10::Device device = device_of(tables);
  TORCH_CHECK_VALUE(device_of(keys) == device, "tables are on ", device, " and ids on ", keys[0].device());
  const std::vector<int64_t> dimensions = dimensions_of(tables);
  const std::vector<sok_columns> columns = make_columns(tables, names);
  Lookups lookups({keys, key_tables, combiners, row_splits, bagged, weights, weighted});
  std::vector<at::Tensor> outputs = lookups.allocate_outputs(dimensions, concat, tables[0].options());
  const Context context(device, Earlier::kRaised);
  SOK_CALL(sok_gather_combine(context.get(), static_cast<int32_t>(columns.size()), columns.data(), lookups.size(),
                              lookups.data()));
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

}  // namespace sok_torch
