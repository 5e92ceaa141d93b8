// SPDX-License-Identifier: Apache-2.0
// Dynamic tables of the core behind TensorFlow's variables. The variable of a table and those of its optimizer states
// hold tensors on the columns of one table, which lives as long as any of them.
//
// Such a tensor lies on a range of addresses that stays. It has the shape that the column had when the variable was
// last shown it: ops of this package ask the core instead (VariableView), and TensorFlow's own see that shape.
#ifndef SOK_TENSORFLOW_DYNAMIC_TABLE_H_
#define SOK_TENSORFLOW_DYNAMIC_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "gpu.h"
#include "support.h"
#include "tensorflow/core/framework/resource_var.h"

namespace sok::tf {

// A table of the core, and which of its columns variables show.
class DynamicTable {
 public:
  // Takes over the table.
  DynamicTable(OpKernelContext* ctx, sok_dynamic_table* table);
  // Waits for the GPU, which may still use its memory.
  ~DynamicTable();
  DynamicTable(const DynamicTable&) = delete;
  DynamicTable& operator=(const DynamicTable&) = delete;

  sok_dynamic_table* get() const { return table_; }

  // A further column that no variable shows, `initial` at every slot: one that is there and like it, or a new one. The
  // table's variable is locked exclusively.
  absl::Status TakeColumn(OpKernelContext* ctx, ::tensorflow::DataType dtype, int64_t width, float initial,
                          int32_t* column);
  // The column is no longer shown.
  void Release(int32_t column);

 private:
  struct Column {
    ::tensorflow::DataType dtype;
    int64_t width;
    float initial;
    bool is_shown;
  };

  sok_dynamic_table* const table_;
  const Gpu gpu_;
  std::mutex mutex_;  // of columns_, which variables release whenever they end
  std::vector<Column> columns_;
};

// The memory of a tensor on a column. Only variables in copy-on-read mode have one, so that no other tensor shares it:
// dense reads copy.
class ColumnBuffer : public ::tensorflow::TensorBuffer {
 public:
  ColumnBuffer(std::shared_ptr<DynamicTable> table, int32_t column)
      : TensorBuffer(sok_dynamic_table_column(table->get(), column).data), table_(std::move(table)), column_(column) {}
  ~ColumnBuffer() override { table_->Release(column_); }

  // That of a tensor; nullptr where it lies on other memory.
  static const ColumnBuffer* Of(const Tensor& tensor);

  const std::shared_ptr<DynamicTable>& table() const { return table_; }
  int32_t column() const { return column_; }
  sok_tensor view() const { return sok_dynamic_table_column(table_->get(), column_); }

  size_t size() const override;
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(::tensorflow::AllocationDescription*) const override {}
  bool OwnsMemory() const override { return false; }  // nobody may take it for an output of his own

 private:
  std::shared_ptr<DynamicTable> table_;
  int32_t column_;
};

// The tensor of a locked variable as the core takes it; of a column with the slots that there are now.
sok_tensor VariableView(const Tensor& tensor);

// Gives an exclusively locked variable the tensor of a column: [slots, width], or [slots] where it is `flat`.
void ShowColumn(::tensorflow::Var* variable, std::shared_ptr<DynamicTable> table, int32_t column, bool flat);

// The same column again, as it is now.
void ShowGrown(::tensorflow::Var* variable);

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_DYNAMIC_TABLE_H_
