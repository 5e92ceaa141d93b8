// SPDX-License-Identifier: Apache-2.0
// The op gather_combine, and plain_pairs.
#include <ATen/Functions.h>

#include "context.h"
#include "ops.h"
#include "sok/lookup.h"
#include "status.h"
#include "views.h"

namespace sok_torch {

std::vector<at::Tensor> gather_combine(at::TensorList tables, const Names& names, at::TensorList keys,
                                       at::IntArrayRef key_tables, at::IntArrayRef combiners,
                                       std::optional<at::TensorList> row_splits, std::optional<at::IntArrayRef> bagged,
                                       std::optional<at::TensorList> weights, std::optional<at::IntArrayRef> weighted,
                                       bool concat, std::optional<at::IntArrayRef> members,
                                       std::optional<at::IntArrayRef> by_key) {
  const c10::Device device = device_of(tables);
  TORCH_CHECK_VALUE(device_of(keys) == device, "tables are on ", device, " and ids on ", keys[0].device());
  const std::vector<int64_t> dimensions = dimensions_of(tables);
  const at::TensorList no_tensors;
  const at::IntArrayRef none;
  const std::vector<sok_columns> columns = make_columns(tables, names, by_key.value_or(none));
  Lookups lookups({keys, key_tables, combiners, row_splits.value_or(no_tensors), bagged.value_or(none),
                   weights.value_or(no_tensors), weighted.value_or(none)});
  lookups.set_members(members.value_or(none), nullptr);
  std::vector<at::Tensor> outputs = lookups.allocate_outputs(dimensions, concat, tables[0].options());
  const Context context(device, Earlier::kRaised);
  SOK_CALL(sok_gather_combine(context.get(), static_cast<int32_t>(columns.size()), columns.data(), lookups.size(),
                              lookups.data()));
  return outputs;
}

at::Tensor locate_members_of(const at::Tensor& keys, const std::optional<at::Tensor>& row_splits, std::string stack,
                             int64_t num_rows, const Names& names, at::IntArrayRef first_keys, at::IntArrayRef rows) {
  TORCH_CHECK_VALUE(names.size() == first_keys.size() && names.size() == rows.size(),
                    "names, first_keys and rows must have one entry a member");
  std::vector<sok_member> members;
  for (size_t i = 0; i < names.size(); ++i) members.push_back({names.get(i).c_str(), first_keys[i], rows[i]});
  sok_placement placement = SOK_PLACEMENT_INIT;
  placement.name = stack.c_str();
  placement.num_rows = num_rows;
  placement.dimension = 1;
  std::vector<at::Tensor> owned;
  at::Tensor slots = at::empty({keys.size(0)}, keys.options().dtype(at::kLong));
  sok_lookup lookup = SOK_LOOKUP_INIT;
  lookup.keys = view(keys, "keys", &owned);
  lookup.slots = view(slots, "slots");
  if (row_splits.has_value()) lookup.row_splits = view(*row_splits, "row_splits", &owned);
  lookup.num_members = static_cast<int32_t>(members.size());
  lookup.members = members.data();
  const Context context(keys.device(), Earlier::kRaised);
  SOK_CALL(sok_locate(context.get(), 1, &placement, nullptr, 1, &lookup, 0));
  return slots;
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
