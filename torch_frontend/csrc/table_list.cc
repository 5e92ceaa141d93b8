// SPDX-License-Identifier: Apache-2.0
#include "table_list.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace sok_torch {

TableList::TableList(std::vector<at::Tensor> tables, std::vector<int64_t> positions, Names names,
                     std::vector<int64_t> owners, std::vector<int64_t> num_rows)
    : positions_(std::move(positions)),
      names_(std::move(names)),
      owners_(std::move(owners)),
      num_rows_(std::move(num_rows)) {
  TORCH_CHECK_VALUE(
      names_.size() == tables.size() && owners_.size() == tables.size() && num_rows_.size() == tables.size(),
      "a list of tables needs one name, owner and number of rows a table");
  tables_.reserve(tables.size());
  for (const at::Tensor& table : tables) tables_.emplace_back(table.getIntrusivePtr());
  for (const int64_t table : positions_) {
    TORCH_CHECK_VALUE(table >= 0 && table < static_cast<int64_t>(tables_.size()), "a lookup names table ", table,
                      " of ", tables_.size());
    names_by_lookup_.push_back(names_.get(table));
    owners_by_lookup_.push_back(owners_[table]);
    num_rows_by_lookup_.push_back(num_rows_[table]);
  }
}

std::vector<at::Tensor> TableList::tables() const {
  std::vector<at::Tensor> result;
  result.reserve(tables_.size());
  for (const auto& weak : tables_) {
    at::Tensor table(weak.lock());
    if (!table.defined()) return {};
    result.push_back(std::move(table));
  }
  return result;
}

bool TableList::present() const {
  return std::none_of(tables_.begin(), tables_.end(), [](const auto& weak) { return weak.expired(); });
}

std::optional<at::Device> TableList::device() const {
  std::optional<at::Device> result;
  for (const auto& weak : tables_) {
    if (weak.expired()) return std::nullopt;
    const at::Device device = weak._unsafe_get_target()->device();
    if (result.has_value() && *result != device) return std::nullopt;
    result = device;
  }
  return result;
}

bool TableList::have_gradients() const {
  for (const auto& weak : tables_) {
    if (!weak.expired() && weak._unsafe_get_target()->grad().defined()) return true;
  }
  return false;
}

bool TableList::fit(std::vector<at::Tensor> states, bool rowwise) const {
  if (states.size() != tables_.size()) return false;
  for (size_t i = 0; i < states.size(); ++i) {
    if (tables_[i].expired()) return false;
    const at::TensorImpl* table = tables_[i]._unsafe_get_target();
    const at::Tensor& state = states[i];
    if (state.layout() != at::kStrided || state.scalar_type() != at::kFloat || !state.is_contiguous() ||
        state.device() != table->device() || table->dim() != 2 || state.dim() != (rowwise ? 1 : 2) ||
        state.size(0) != table->size(0) || (!rowwise && state.size(1) != table->size(1))) {
      return false;
    }
  }
  return true;
}

void TableList::forget_gradients() const {
  for (const auto& weak : tables_) {
    if (weak.expired()) continue;
    at::TensorImpl* table = weak._unsafe_get_target();
    if (table->grad().defined()) table->mutable_grad().reset();
  }
}

}  // namespace sok_torch
