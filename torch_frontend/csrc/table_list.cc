// SPDX-License-Identifier: Apache-2.0
#include "table_list.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace sok_torch {

TableList::TableList(std::vector<at::Tensor> tables, std::vector<int64_t> positions, Names names,
                     std::vector<int64_t> owners, std::vector<int64_t> num_rows)
    : tables_(tables),
      positions_(std::move(positions)),
      names_(std::move(names)),
      owners_(std::move(owners)),
      num_rows_(std::move(num_rows)) {
  TORCH_CHECK_VALUE(
      names_.size() == tables.size() && owners_.size() == tables.size() && num_rows_.size() == tables.size(),
      "a list of tables needs one name, owner and number of rows a table");
  for (const int64_t table : positions_) {
    TORCH_CHECK_VALUE(table >= 0 && table < static_cast<int64_t>(tables_.size()), "a lookup names table ", table,
                      " of ", tables_.size());
  }
}

std::optional<at::Device> TableList::device() const {
  std::optional<at::Device> result;
  for (size_t i = 0; i < tables_.size(); ++i) {
    const at::TensorImpl* const table = tables_[i];
    if (table == nullptr || (result.has_value() && *result != table->device())) return std::nullopt;
    result = table->device();
  }
  return result;
}

bool TableList::have_gradients() const {
  for (size_t i = 0; i < tables_.size(); ++i) {
    const at::TensorImpl* const table = tables_[i];
    if (table != nullptr && table->grad().defined()) return true;
  }
  return false;
}

bool TableList::fit(const c10::intrusive_ptr<TensorList>& states, std::vector<int64_t> rowwise) const {
  const WeakTensors& tensors = states->tensors();
  if (tensors.size() != tables_.size() * rowwise.size()) return false;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::TensorImpl* const table = tables_[i / rowwise.size()];
    const at::TensorImpl* const state = tensors[i];
    const bool of_row = rowwise[i % rowwise.size()] != 0;
    if (table == nullptr || state == nullptr || state->layout() != at::kStrided ||
        state->dtype() != caffe2::TypeMeta::Make<float>() || !state->is_contiguous() ||
        state->device() != table->device() || table->dim() != 2 || state->dim() != (of_row ? 1 : 2) ||
        state->size(0) != table->size(0) || (!of_row && state->size(1) != table->size(1))) {
      return false;
    }
  }
  return true;
}

void TableList::forget_gradients() const {
  for (size_t i = 0; i < tables_.size(); ++i) {
    at::TensorImpl* const table = tables_[i];
    if (table != nullptr && table->grad().defined()) table->mutable_grad().reset();
  }
}

}  // namespace sok_torch
