// SPDX-License-Identifier: Apache-2.0
// The stage `locate` of a call that has tables with an index: what of the tables, and which slots, the stages after it
// use.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <vector>

#include "context.h"
#include "indexed_table.h"
#include "lookups.h"
#include "sok/lookup.h"
#include "table_list.h"

namespace sok_torch {

// What a call may do to tables with an index: nothing; insert keys that they lack, or those of them that they admit;
// that with the filter_ratio of the tables (SOK_LOCATE_FILTER).
constexpr int64_t kEvaluates = 0, kTrains = 1, kTrainsWithFilter = 2;

// A table with an index is trained in a call where its gradient is recorded: it inserts the keys that it lacks. Else it
// is evaluated and does not change. Its rows are found by key where they are, when they are pooled; or on a GPU, and
// where they are wanted again for gradients of weights, they are read into memory of the call's that takes the table's
// place.
class LocatedTables {
 public:
  // tables: those of the list, in order. training: one of kEvaluates to kTrainsWithFilter. keeps_rows: whether the rows
  // that were read will be read again, when tables may have changed.
  LocatedTables(const TableList& list, at::TensorList tables, int64_t training, bool keeps_rows);

  // lookups[i].keys -> lookups[i].slots, of tables with an index and without, on the tables' device; those of tables
  // by_key() become absent. What sok_locate throws; no table has changed then.
  void locate(const Context& context, const std::vector<sok_placement>& placements, std::vector<sok_lookup>* lookups);

  // Whether there are tables with an index that are not by_key().
  bool locates() const { return locates_; }

  // What slots are those of: the tables that are trained, and those without an index; of the others no gradient is
  // recorded. They are by_key(), or the rows that were read once keys are located.
  const std::vector<at::Tensor>& tables() const { return tables_; }

  // Positions of the tables whose rows are found by key.
  const std::vector<int64_t>& by_key() const { return by_key_; }

  // In which the slots of each table were located.
  const std::vector<int64_t>& generations() const { return generations_; }

 private:
  void read(const Context& context, const std::vector<sok_lookup>& lookups);

  std::vector<at::Tensor> tables_;
  std::vector<c10::intrusive_ptr<IndexedTable>> indexed_;  // null: it has no index
  std::vector<bool> is_evaluated_;
  const bool reads_;  // the rows of these tables
  std::vector<int64_t> by_key_;
  bool locates_ = false;
  std::vector<int64_t> generations_;
  uint32_t flags_;  // SOK_LOCATE_*
};

// The same for the lookups of a process alone, whose keys become slots. They stay where the table is by_key(), and all
// do where slots are wanted of no table. `training` as above. concat: outputs are to be side by side. What is wrong
// with a lookup is found before a table changes.
LocatedTables locate(const TableList& list, at::TensorList tables, LookupLists* lookups, bool concat, int64_t training);

// Of a list without indices: the keys of members of stacks become slots.
void locate_members(const TableList& list, at::TensorList tables, LookupLists* lookups, bool concat);

}  // namespace sok_torch
