// SPDX-License-Identifier: Apache-2.0
#include "table_list.h"

#include <c10/util/Exception.h>

#include <numeric>
#include <utility>

namespace sok_torch {

TableList::TableList(std::vector<at::Tensor> tables, std::vector<int64_t> gradients, std::vector<int64_t> positions,
                     Names names, std::vector<int64_t> owners, std::vector<int64_t> num_rows, StackMembers members)
    : tables_(tables),
      gradients_(find_gradients(gradients)),
      positions_(std::move(positions)),
      names_(std::move(names)),
      owners_(std::move(owners)),
      num_rows_(std::move(num_rows)),
      members_(std::move(members)) {
  TORCH_CHECK_VALUE(
      names_.size() == tables.size() && owners_.size() == tables.size() && num_rows_.size() == tables.size(),
      "a list of tables needs one name, owner and number of rows a table");
  for (const int64_t table : positions_) {
    TORCH_CHECK_VALUE(table >= 0 && table < static_cast<int64_t>(tables_.size()), "a lookup names table ", table,
                      " of ", tables_.size());
  }
  const size_t num_members = members_.names.size();
  TORCH_CHECK_VALUE((members_.counts.empty() || members_.counts.size() == positions_.size()) &&
                        std::accumulate(members_.counts.begin(), members_.counts.end(), size_t{0}) == num_members &&
                        members_.first_keys.size() == num_members && members_.num_rows.size() == num_members,
                    "the members of stacks need one name, first key and number of rows each, and a number a lookup");
  for (size_t i = 0; i < num_members; ++i) {
    member_views_.push_back({members_.names[i].c_str(), members_.first_keys[i], members_.num_rows[i]});
  }
  const c10::weak_intrusive_ptr<IndexedTable> none{c10::intrusive_ptr<IndexedTable>()};
  for (size_t i = 0; i < tables.size(); ++i) {
    const auto table = IndexedTable::of(tables[i]);
    TORCH_CHECK_VALUE(table.defined() || num_rows_[i] != SOK_ANY_KEY, "the memory of dynamic table '", names_.get(i),
                      "' is another than it was made with; it cannot be moved or converted");
    if (!table.defined()) continue;
    if (indexed_.empty()) indexed_.resize(tables.size(), none);
    indexed_[i] = table;
  }
}

std::vector<c10::intrusive_ptr<IndexedTable>> TableList::indexed_tables() const {
  if (indexed_.empty()) return std::vector<c10::intrusive_ptr<IndexedTable>>(size());
  std::vector<c10::intrusive_ptr<IndexedTable>> result;
  result.reserve(indexed_.size());
  for (const auto& weak : indexed_) result.push_back(weak.lock());
  return result;
}

void TableList::set_members(Lookups* lookups) const {
  if (!members_.counts.empty()) lookups->set_members(members_.counts, member_views_.data());
}

void TableList::check_keys(at::TensorList keys) const {
  const std::vector<c10::intrusive_ptr<IndexedTable>> tables = indexed_tables();
  for (size_t i = 0; i < keys.size(); ++i) {
    const int64_t table = positions_.at(i);
    if (tables[table].defined()) tables[table]->check_keys(keys[i], names_.get(table).c_str());
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

}  // namespace sok_torch
