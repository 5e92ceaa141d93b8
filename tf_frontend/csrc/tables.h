// SPDX-License-Identifier: Apache-2.0
// Tables of an op: what its attributes say about them, and the variables that hold their rows.
#ifndef SOK_TENSORFLOW_TABLES_H_
#define SOK_TENSORFLOW_TABLES_H_

#include <string>
#include <vector>

#include "indexed_table.h"
#include "support.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

// Attributes of each op that takes tables; tables are distinct, and the lists are equally long.
#define SOK_TABLE_ATTRIBUTES             \
  Attr("num_tables: int >= 1")           \
      .Attr("table_names: list(string)") \
      .Attr("num_rows: list(int)")       \
      .Attr("dimensions: list(int)")     \
      .Attr("owners: list(int)")         \
      .Attr("num_ranks: int >= 1")       \
      .Attr("rank: int >= 0")            \
      .Attr("indexed: list(int) = []")

// For the documentation of those ops.
#define SOK_TABLE_ATTRIBUTES_DOC                                                                 \
  "table_names: for messages.\n"                                                                 \
  "num_rows: rows of each table on all ranks together; -1: any integer is a key.\n"              \
  "dimensions: elements a row of each table.\n"                                                  \
  "owners: -1 for a table whose rows are dealt out over the ranks, or the rank that holds it.\n" \
  "num_ranks: how many processes share the tables.\n"                                            \
  "rank: this process.\n"                                                                        \
  "indexed: the positions, ascending, of those tables that have an index, as dynamic ones do.\n"

// What ops that find slots give for each table with an index, and ops before whose gradients they are take along.
#define SOK_GENERATIONS_OUTPUT Output("generations: int64")
#define SOK_GENERATIONS_INPUT Input("generations: num_generations * int64").Attr("num_generations: int >= 0")
#define SOK_GENERATIONS_OUTPUT_DOC                                                                            \
  "generations: [n] in host memory, of each table with an index whose keys were inserted: by it a gradient\n" \
  "  is refused that comes after one of the slots has lost its key.\n"
#define SOK_GENERATIONS_INPUT_DOC "generations: none, or those of the slots; not read, the gradient wants them.\n"

namespace sok::tf {

using ::tensorflow::Var;
using VarPtr = ::tensorflow::core::RefCountPtr<Var>;

// The tables of an op as the stages before the slots are known take them.
class TableAttributes {
 public:
  explicit TableAttributes(OpKernelConstruction* ctx);
  const std::vector<sok_placement>& tables() const { return tables_; }
  const std::vector<int64_t>& dimensions() const { return dimensions_; }
  int num_tables() const { return static_cast<int>(tables_.size()); }
  // Whether an index says the slots of a table's keys; and how many such tables there are.
  bool is_indexed(int table) const { return place_[table] >= 0; }
  int num_indexed() const { return num_indexed_; }
  // The place of a table among those that have an index.
  int place(int table) const { return place_[table]; }
  int num_ranks() const { return num_ranks_; }
  int rank() const { return rank_; }

 private:
  std::vector<std::string> names_;
  std::vector<int64_t> dimensions_;
  std::vector<sok_placement> tables_;
  std::vector<int> place_;  // -1 of tables without an index
  int num_indexed_ = 0;
  int num_ranks_ = 1;
  int rank_ = 0;
};

// Locks of several variables, taken in the order of their addresses as TensorFlow's own kernels do.
//
// Readers hold shared locks and read the variable's buffer itself: a reference to it (a dense read) would make the next
// writer copy the table. Writers hold exclusive locks and switch the variable to copy-on-read mode, so that whoever
// holds a dense read keeps the rows as they were; that copies the table once if such a read is alive at the first
// write. On a GPU the locks order what is enqueued, and the stream does the rest.
class VariableLocks {
 public:
  enum Mode { kShared, kExclusive };
  VariableLocks() = default;
  ~VariableLocks();
  VariableLocks(const VariableLocks&) = delete;
  VariableLocks& operator=(const VariableLocks&) = delete;

  // Finds the variables that the op's input lists of these names hold, and locks them. Call once.
  absl::Status Lock(OpKernelContext* ctx, const std::vector<const char*>& inputs, Mode mode);

  // The two halves of it, between which other variables may be added.
  absl::Status Find(OpKernelContext* ctx, const std::vector<const char*>& inputs);
  absl::Status LockFound(OpKernelContext* ctx, Mode mode);
  void Add(VarPtr variable, std::string name);

  // The i-th variable's tensor, in the order of the input lists and then of `Add`.
  Tensor* tensor(int i) { return variables_[i]->tensor(); }
  Var* variable(int i) const { return variables_[i].get(); }
  // Whether dense reads copy it, so that writers need not.
  bool is_copied_on_read(int i) const { return variables_[i]->copy_on_read_mode.load(); }
  int size() const { return static_cast<int>(variables_.size()); }

 private:
  std::vector<VarPtr> variables_;
  std::vector<std::string> names_;  // for messages
  std::vector<::tensorflow::mutex*> locked_;
  Mode mode_ = kShared;
};

// Of a table whose slots nobody asks for; with it sok_locate checks whose keys are.
inline const sok_index kNoIndex = {
    sizeof(sok_index), nullptr,
    [](const sok_context*, int32_t, const sok_index_request*, uint32_t) -> int { return SOK_OK; }};

// The tables as the stages after it take them: the rows are those of locked variables [0, num_tables()), whose dtypes
// and shapes are checked.
absl::Status ReadColumns(VariableLocks* locks, const TableAttributes& tables, std::vector<sok_columns>* columns);

// The table with an index whose rows the tensor of a locked variable is.
absl::Status FindIndexed(const sok_placement& table, const Tensor& weight, IndexedTable** indexed);

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_TABLES_H_
