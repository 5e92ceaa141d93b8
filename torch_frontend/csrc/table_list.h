// SPDX-License-Identifier: Apache-2.0
// The tables of a call, known from one call to the next: what is said of them is read once, not at every step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <optional>
#include <string>
#include <vector>

#include "indexed_table.h"
#include "ops.h"
#include "table_gradient.h"
#include "views.h"
#include "weak_tensors.h"

namespace sok_torch {

// Members of stacks (sok_member), in order: one name, first key and number of rows each. They are those of the lookups
// one after another: `counts` has one a lookup, 0 where its table is no stack, or is empty where none is.
struct StackMembers {
  std::vector<int64_t> counts;
  std::vector<std::string> names;
  std::vector<int64_t> first_keys, num_rows;
};

// torch.classes.sok.TableList: distinct tables. It does not keep them alive; once one is gone it is of no use any more.
class TableList final : public torch::CustomClassHolder {
 public:
  // One name, owner and number of rows a table, as in the schemas of library.cc. gradients: the numbers of the tables'
  // TableGradients, or none. positions: of the table of each lookup.
  TableList(std::vector<at::Tensor> tables, std::vector<int64_t> gradients, std::vector<int64_t> positions, Names names,
            std::vector<int64_t> owners, std::vector<int64_t> num_rows, StackMembers members);
  TableList(const TableList&) = delete;
  TableList& operator=(const TableList&) = delete;

  // The tables, in order; empty when one is gone.
  std::vector<at::Tensor> tables() const { return tables_.lock(); }
  const WeakTensors& weak() const { return tables_; }

  // Whether all of them are still there.
  bool present() const { return tables_.present(); }

  // Where they are; nothing when one is gone, or when they are on several devices.
  std::optional<at::Device> device() const;

  // Where calls leave the gradients of the tables.
  const std::vector<c10::weak_intrusive_ptr<TableGradient>>& gradients() const { return gradients_; }

  const std::vector<int64_t>& positions() const { return positions_; }
  const Names& names() const { return names_; }
  at::IntArrayRef owners() const { return owners_; }
  at::IntArrayRef num_rows() const { return num_rows_; }
  size_t size() const { return tables_.size(); }

  // Whether some of the tables have an index, so that slots are to be located on one rank too.
  bool indexed() const { return !indexed_.empty(); }

  // Each table as one with an index; null for those that have none.
  std::vector<c10::intrusive_ptr<IndexedTable>> indexed_tables() const;

  // Of each lookup how many members of a stack it has; empty: none has.
  at::IntArrayRef num_members() const { return members_.counts; }

  // Tells lookups of their members.
  void set_members(Lookups* lookups) const;

  // Throws TypeError where lookups in a table that is `indexed` may not have such keys. One tensor a lookup.
  void check_keys(at::TensorList keys) const;

 private:
  WeakTensors tables_;
  std::vector<c10::weak_intrusive_ptr<TableGradient>> gradients_;
  std::vector<int64_t> positions_;
  Names names_;
  std::vector<int64_t> owners_, num_rows_;
  std::vector<c10::weak_intrusive_ptr<IndexedTable>> indexed_;  // of all tables, or empty
  StackMembers members_;
  std::vector<sok_member> member_views_;
};

}  // namespace sok_torch
