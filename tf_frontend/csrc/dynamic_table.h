// SPDX-License-Identifier: Apache-2.0
// Dynamic tables of the core behind TensorFlow's variables.
#ifndef SOK_TENSORFLOW_DYNAMIC_TABLE_H_
#define SOK_TENSORFLOW_DYNAMIC_TABLE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu.h"
#include "indexed_table.h"

namespace sok::tf {

// A table of the core, and which of its columns variables show.
class DynamicTable : public IndexedTable {
 public:
  // Takes over the table.
  DynamicTable(OpKernelContext* ctx, sok_dynamic_table* table);
  // Waits for the GPU, which may still use its memory.
  ~DynamicTable() override;

  // That which the tensor of a variable is a column of; nullptr of any other.
  static std::shared_ptr<DynamicTable> Of(const Tensor& tensor);

  sok_dynamic_table* get() const { return table_; }

  const sok_index* index() const override { return sok_dynamic_table_as_index(table_); }
  sok_columns columns(const char*) const override { return sok_dynamic_table_columns(table_); }
  int64_t generation() const override { return sok_dynamic_table_generation(table_); }
  sok_tensor column(int32_t column) const override { return sok_dynamic_table_column(table_, column); }
  absl::Status Read(const sok_context* core, sok_tensor keys, sok_tensor rows) const override;
  absl::Status TakeBack(const sok_context* core, sok_tensor keys, sok_tensor slots) override;

  // A further column that no variable shows, `initial` at every slot: one that is there and like it, or a new one. The
  // table's variable is locked exclusively.
  absl::Status TakeColumn(OpKernelContext* ctx, ::tensorflow::DataType dtype, int64_t width, float initial,
                          int32_t* column);
  void Release(int32_t column) override;

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

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_DYNAMIC_TABLE_H_
