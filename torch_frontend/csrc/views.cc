// SPDX-License-Identifier: Apache-2.0
#include "views.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <numeric>
#include <type_traits>
#include <utility>

#include "indexed_table.h"

namespace sok_torch {

int32_t core_dtype(at::ScalarType dtype, const char* what) {
  switch (dtype) {
    case at::kInt:
      return SOK_INT32;
    case at::kLong:
      return SOK_INT64;
    case at::kUInt32:
      return SOK_UINT32;
    case at::kUInt64:
      return SOK_UINT64;
    case at::kHalf:
      return SOK_FLOAT16;
    case at::kFloat:
      return SOK_FLOAT32;
    case at::kDouble:
      return SOK_FLOAT64;
    case at::kBFloat16:
      return SOK_BFLOAT16;
    default:
      TORCH_CHECK_VALUE(false, what, " has dtype ", dtype, ", which is not supported");
  }
}

sok_tensor view(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK_VALUE(tensor.dim() <= 2, what, " must have at most 2 dimensions, not ", tensor.dim());
  TORCH_CHECK_VALUE(tensor.is_contiguous(), what, " must be contiguous");
  sok_tensor result = SOK_NO_TENSOR;
  result.data = tensor.data_ptr();
  result.dtype = core_dtype(tensor.scalar_type(), what);
  result.rank = static_cast<int32_t>(tensor.dim());
  for (int64_t i = 0; i < tensor.dim(); ++i) result.shape[i] = tensor.size(i);
  return result;
}

sok_tensor view(const at::Tensor& tensor, const char* what, std::vector<at::Tensor>* owner) {
  if (tensor.is_contiguous()) return view(tensor, what);
  owner->push_back(tensor.contiguous());
  return view(owner->back(), what);
}

sok_tensor view_of_rows(const at::Tensor& tensor, const char* what, std::vector<at::Tensor>* owner) {
  const bool apart = tensor.dim() == 2 && tensor.numel() > 0 && !tensor.is_contiguous() && tensor.stride(1) == 1 &&
                     tensor.stride(0) >= tensor.size(1);
  if (!apart) return view(tensor, what, owner);
  sok_tensor result = SOK_NO_TENSOR;
  result.data = tensor.data_ptr();
  result.dtype = core_dtype(tensor.scalar_type(), what);
  result.rank = 2;
  result.shape[0] = tensor.size(0);
  result.shape[1] = tensor.size(1);
  result.row_stride = tensor.stride(0);
  return result;
}

c10::Device device_of(at::TensorList tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), "a call needs at least one table and one lookup");
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.device() == tensors[0].device(), "tables and ids must be on one device, not on ",
                      tensors[0].device(), " and ", tensor.device());
  }
  return tensors[0].device();
}

std::vector<int64_t> dimensions_of(at::TensorList tables) {
  std::vector<int64_t> result;
  result.reserve(tables.size());
  for (const at::Tensor& table : tables) {
    TORCH_CHECK_VALUE(table.dim() == 2, "a table must be 2-D, not ", table.dim(), "-D");
    result.push_back(table.size(1));
  }
  return result;
}

std::vector<sok_placement> placements_of(const c10::List<std::string>& names, at::IntArrayRef owners,
                                         at::IntArrayRef num_rows, at::IntArrayRef dimensions, int64_t num_ranks,
                                         int64_t rank) {
  const size_t n = owners.size();
  TORCH_CHECK_VALUE(names.size() == n && num_rows.size() == n && dimensions.size() == n,
                    "names, owners, num_rows and dimensions must have one entry a table");
  static_assert(std::is_reference_v<decltype(names.get(0))>);
  std::vector<sok_placement> result(n, SOK_PLACEMENT_INIT);
  for (size_t i = 0; i < n; ++i) {
    result[i].name = names.get(i).c_str();
    result[i].owner = static_cast<int32_t>(owners[i]);
    result[i].num_ranks = static_cast<int32_t>(num_ranks);
    result[i].rank = static_cast<int32_t>(rank);
    result[i].num_rows = num_rows[i];
    result[i].dimension = dimensions[i];
  }
  return result;
}

sok_columns make_columns(const at::Tensor& table, const char* name) {
  TORCH_CHECK_VALUE(table.dim() == 2, "table ", name, " must be 2-D, not ", table.dim(), "-D");
  const at::ScalarType dtype = table.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, "table ", name, " has dtype ",
                    dtype, "; tables are float32, float16 or bfloat16");
  if (const auto indexed = IndexedTable::of(table); indexed.defined()) return indexed->columns(name);
  sok_columns result = SOK_COLUMNS_INIT;
  result.name = name;
  result.weight = view(table, name);
  return result;
}

std::vector<sok_columns> make_columns(at::TensorList tables, const c10::List<std::string>& names,
                                      at::IntArrayRef by_key) {
  TORCH_CHECK_VALUE(tables.size() == names.size(), "names must have one entry a table: ", names.size(), " for ",
                    tables.size());
  std::vector<sok_columns> result;
  result.reserve(tables.size());
  for (size_t i = 0; i < tables.size(); ++i) result.push_back(make_columns(tables[i], names.get(i).c_str()));
  for (const int64_t i : by_key) {
    TORCH_CHECK_VALUE(i >= 0 && i < static_cast<int64_t>(tables.size()), "by_key names table ", i, " of ",
                      tables.size());
    const auto indexed = IndexedTable::of(tables[i]);
    TORCH_CHECK_VALUE(indexed.defined(), "table ", names.get(i), " has no index, in which its keys would be found");
    result[i].index = indexed->index();
  }
  return result;
}

Lookups::Lookups(const LookupArguments& arguments) {
  const size_t n = arguments.keys.size();
  TORCH_CHECK_VALUE(arguments.tables.size() == n && arguments.combiners.size() == n,
                    "keys, key_tables and combiners must have one entry a lookup");
  TORCH_CHECK_VALUE(
      arguments.row_splits.size() == arguments.bagged.size() && arguments.weights.size() == arguments.weighted.size(),
      "row_splits and bagged, weights and weighted must have equal lengths");
  lookups_.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    sok_lookup lookup = SOK_LOOKUP_INIT;
    lookup.table = static_cast<int32_t>(arguments.tables[i]);
    lookup.combiner = static_cast<int32_t>(arguments.combiners[i]);
    TORCH_CHECK_VALUE(arguments.keys[i].dim() == 1, "keys must be 1-D, not ", arguments.keys[i].dim(), "-D");
    lookup.keys = view(arguments.keys[i], "keys", &owned_);
    lookups_.push_back(lookup);
  }
  for (size_t i = 0; i < arguments.bagged.size(); ++i) {
    lookups_.at(arguments.bagged[i]).row_splits = view(arguments.row_splits[i], "row_splits", &owned_);
    TORCH_CHECK_VALUE(arguments.row_splits[i].dim() == 1 && arguments.row_splits[i].numel() > 0,
                      "row_splits must be 1-D and have batch + 1 entries");
  }
  for (size_t i = 0; i < arguments.weighted.size(); ++i) {
    lookups_.at(arguments.weighted[i]).weights = view(arguments.weights[i], "weights", &owned_);
  }
}

void Lookups::set_generations(at::IntArrayRef generations) {
  for (sok_lookup& lookup : lookups_) {
    if (!generations.empty()) lookup.generation = generations.at(lookup.table);
  }
}

int64_t Lookups::num_bags(size_t i) const {
  const sok_lookup& lookup = lookups_[i];
  return lookup.row_splits.rank == 0 ? lookup.keys.shape[0] : lookup.row_splits.shape[0] - 1;
}

void Lookups::set_members(at::IntArrayRef counts, const sok_member* members) {
  if (counts.empty()) return;
  TORCH_CHECK_VALUE(counts.size() == lookups_.size(), "members must have one number a lookup");
  for (size_t i = 0; i < lookups_.size(); ++i) {
    if (counts[i] == 0) continue;
    lookups_[i].num_members = static_cast<int32_t>(counts[i]);
    lookups_[i].members = members;
    if (members != nullptr) members += counts[i];
    TORCH_CHECK_VALUE(num_bags(i) % counts[i] == 0, "lookup ", i, " has ", num_bags(i), " bags, and its stack ",
                      counts[i], " tables: flat ids have as many bags for each of them");
  }
}

void Lookups::check_equal_bags() const {
  for (size_t i = 1; i < lookups_.size(); ++i) {
    TORCH_CHECK_VALUE(batch(i) == batch(0), "concat=True puts vectors of as many bags side by side, but lookup ", i,
                      " has ", batch(i), " and lookup 0 has ", batch(0));
  }
}

std::vector<int64_t> Lookups::widths(at::IntArrayRef dimensions) const {
  std::vector<int64_t> result;
  result.reserve(lookups_.size());
  for (size_t i = 0; i < lookups_.size(); ++i) {
    const int64_t table = lookups_[i].table;
    TORCH_CHECK_VALUE(table >= 0 && table < static_cast<int64_t>(dimensions.size()), "lookup ", i, " names table ",
                      table, " of ", dimensions.size());
    result.push_back(dimensions[table] * std::max(1, lookups_[i].num_members));
  }
  return result;
}

std::vector<at::Tensor> Lookups::allocate_outputs(at::IntArrayRef dimensions, bool concat,
                                                  const at::TensorOptions& options) {
  const at::TensorOptions float32 = options.dtype(at::kFloat).requires_grad(false);
  const std::vector<int64_t> widths = this->widths(dimensions);
  std::vector<at::Tensor> outputs;
  if (!concat) {
    outputs.reserve(lookups_.size());
    for (size_t i = 0; i < lookups_.size(); ++i) {
      outputs.push_back(at::empty({batch(i), widths[i]}, float32));
      lookups_[i].output = view(outputs.back(), "output");
    }
    return outputs;
  }
  check_equal_bags();
  const int64_t width = std::accumulate(widths.begin(), widths.end(), int64_t{0});
  outputs.push_back(at::empty({batch(0), width}, float32));
  const sok_tensor whole = view(outputs.back(), "output");
  int64_t column = 0;
  for (size_t i = 0; i < lookups_.size(); ++i) {
    sok_tensor& output = lookups_[i].output = whole;
    if (whole.data != nullptr) output.data = static_cast<float*>(whole.data) + column;
    output.shape[1] = widths[i];
    output.row_stride = width;
    column += widths[i];
  }
  return outputs;
}

std::vector<at::Tensor> columns_of(const at::Tensor& tensor, at::IntArrayRef widths) {
  TORCH_CHECK_VALUE(tensor.dim() == 2, "columns of a tensor with ", tensor.dim(), " dimensions");
  const int64_t rows = tensor.size(0);
  const bool whole_rows = tensor.stride(1) == 1 && (rows < 2 || tensor.stride(0) >= tensor.size(1));
  const at::Tensor source = whole_rows ? tensor : tensor.contiguous();
  const c10::VariableVersion version(source.is_inference() ? c10::VariableVersion::DISABLED
                                                           : source.unsafeGetTensorImpl()->version_counter());
  std::vector<at::Tensor> result;
  result.reserve(widths.size());
  int64_t column = 0;
  for (const int64_t width : widths) {
    auto columns =
        source.unsafeGetTensorImpl()->shallow_copy_and_detach(version, /*allow_tensor_metadata_change=*/true);
    columns->set_sizes_and_strides(at::IntArrayRef{rows, width}, at::IntArrayRef{source.stride(0), 1},
                                   source.storage_offset() + column);
    result.emplace_back(std::move(columns));
    column += width;
  }
  TORCH_CHECK_VALUE(column == source.size(1), "widths are ", column, " columns together, not ", source.size(1));
  return result;
}

OutputGradients::OutputGradients(const c10::List<std::optional<at::Tensor>>& given, const Lookups& lookups) {
  TORCH_CHECK_VALUE(given.size() == static_cast<size_t>(lookups.size()),
                    "one output gradient (or None) a lookup is needed: ", given.size(), " for ", lookups.size());
  views_.reserve(given.size());
  for (size_t i = 0; i < given.size(); ++i) {
    const std::optional<at::Tensor> tensor = given.get(i);
    if (tensor.has_value() && tensor->defined()) {
      owned_.push_back(*tensor);  // the list hands out copies
      views_.push_back(view_of_rows(owned_.back(), "output gradient", &owned_));
    } else {
      views_.push_back(kAbsent);
    }
  }
}

WeightGradients::WeightGradients(at::TensorList weights, at::IntArrayRef weighted, const Lookups& lookups)
    : views(lookups.size(), kAbsent) {
  results.reserve(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    results.push_back(at::empty(weights[i].sizes(), weights[i].options().requires_grad(false)));
    views.at(weighted[i]) = view(results.back(), "weight gradient");
  }
}

}  // namespace sok_torch
