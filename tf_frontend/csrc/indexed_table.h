// SPDX-License-Identifier: Apache-2.0
// A table with an index (sok_index), as the stages see it, behind TensorFlow's variables. The variable of a table and
// those of its optimizer states hold tensors on the columns of one table, which lives as long as any of them.
//
// Such a tensor lies on a range of addresses that stays. It has the shape that the column had when the variable was
// last shown it: ops of this package ask the table instead (VariableView), and TensorFlow's own see that shape.
#ifndef SOK_TENSORFLOW_INDEXED_TABLE_H_
#define SOK_TENSORFLOW_INDEXED_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "support.h"
#include "tensorflow/core/framework/resource_var.h"

namespace sok::tf {

class IndexedTable {
 public:
  // A table of which all keys have slots that they keep. index: must live as long as the table; rows: [slots,
  // dimension] in host memory, which must live as long too.
  IndexedTable(const sok_index* index, sok_tensor rows) : index_(index), rows_(rows) {}
  virtual ~IndexedTable() = default;
  IndexedTable(const IndexedTable&) = delete;
  IndexedTable& operator=(const IndexedTable&) = delete;

  virtual const sok_index* index() const { return index_; }

  // The rows as the stages after `locate` take them; and the generation of the slots that were located last.
  virtual sok_columns columns(const char* name) const;
  virtual int64_t generation() const { return 0; }

  // A column as it is now; 0: the rows. And: the column is no longer shown.
  virtual sok_tensor column(int32_t) const { return rows_; }
  virtual void Release(int32_t) {}

  // On a GPU: rows [n, dimension] of keys [n], those that it does not hold too. rows: of the table's dtype.
  virtual absl::Status Read(const sok_context*, sok_tensor /*keys*/, sok_tensor /*rows*/) const {
    return errors::Unimplemented("tables of this kind are on the CPU");
  }

  // Gives up those of the keys [n], in host memory, that the last insertion has inserted. slots: theirs, -1 of keys
  // that it does not hold.
  virtual absl::Status TakeBack(const sok_context*, sok_tensor /*keys*/, sok_tensor /*slots*/) {
    return absl::OkStatus();
  }

 protected:
  IndexedTable() = default;

 private:
  const sok_index* index_ = nullptr;
  sok_tensor rows_ = Absent();
};

// The memory of a tensor on a column. Only variables in copy-on-read mode have one, so that no other tensor shares it:
// dense reads copy.
class ColumnBuffer : public ::tensorflow::TensorBuffer {
 public:
  ColumnBuffer(std::shared_ptr<IndexedTable> table, int32_t column)
      : TensorBuffer(table->column(column).data), table_(std::move(table)), column_(column) {}
  ~ColumnBuffer() override { table_->Release(column_); }

  // That of a tensor; nullptr where it lies on other memory.
  static const ColumnBuffer* Of(const Tensor& tensor);

  const std::shared_ptr<IndexedTable>& table() const { return table_; }
  int32_t column() const { return column_; }
  sok_tensor view() const { return table_->column(column_); }

  size_t size() const override;
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(::tensorflow::AllocationDescription*) const override {}
  bool OwnsMemory() const override { return false; }  // nobody may take it for an output of his own

 private:
  std::shared_ptr<IndexedTable> table_;
  int32_t column_;
};

// The tensor of a locked variable as the core takes it; of a column with the slots that there are now.
sok_tensor VariableView(const Tensor& tensor);

// Gives an exclusively locked variable the tensor of a column: [slots, width], or [slots] where it is `flat`.
void ShowColumn(::tensorflow::Var* variable, std::shared_ptr<IndexedTable> table, int32_t column, bool flat);

// The same column again, as it is now.
void ShowGrown(::tensorflow::Var* variable);

// Lets the variable of a handle, which is made if it is not there, show the rows of a table from now on.
absl::Status ShowRows(OpKernelContext* ctx, const ::tensorflow::ResourceHandle& handle, ::tensorflow::DataType dtype,
                      std::shared_ptr<IndexedTable> table);

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_INDEXED_TABLE_H_
