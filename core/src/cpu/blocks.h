// SPDX-License-Identifier: Apache-2.0
// Blocks of keys that came from each rank for each table, in that order: how locate and gather see an exchange.
#ifndef SOK_CPU_BLOCKS_H_
#define SOK_CPU_BLOCKS_H_

#include <vector>

#include "common/call.h"
#include "common/parallel.h"
#include "cpu/contents.h"

namespace sok::cpu {

class Blocks {
 public:
  struct Range {
    const Table* table;
    int64_t begin, end;  // of the keys of all blocks
    int64_t element;     // where the row of `begin` is in the flat buffer of rows
  };

  // row_bytes(table): what a stage reads and writes for a row.
  template <typename RowBytes>
  Blocks(const sok_context& context, const std::vector<Table>& tables, int32_t num_sources, const int64_t* counts,
         RowBytes&& row_bytes)
      : tables_(tables) {
    int64_t row = 0, element = 0, total = 0;
    for (int32_t source = 0; source < num_sources; ++source) {
      for (size_t t = 0; t < tables.size(); ++t) {
        const int64_t count = counts[rows_.size()];
        rows_.push_back(row);
        elements_.push_back(element);
        row += count;
        element += count * tables[t].dimension;
        total += count * row_bytes(tables[t]);
      }
    }
    num_rows_ = row;
    const int64_t bytes = task_bytes(context, total);
    for (size_t block = 0; block < rows_.size(); ++block) {
      chunks_.add(counts[block], items_per_task(bytes, row_bytes(tables[block % tables.size()])));
    }
  }

  int64_t num_rows() const { return num_rows_; }
  int64_t num_tasks() const { return chunks_.count(); }

  Range operator[](int64_t task) const {
    const Chunks::Range range = chunks_[task];
    const size_t block = static_cast<size_t>(range.item);
    const Table& table = tables_[block % tables_.size()];
    return {&table, rows_[block] + range.begin, rows_[block] + range.end,
            elements_[block] + range.begin * table.dimension};
  }

 private:
  const std::vector<Table>& tables_;
  std::vector<int64_t> rows_, elements_;
  int64_t num_rows_ = 0;
  Chunks chunks_;
};

}  // namespace sok::cpu

#endif  // SOK_CPU_BLOCKS_H_
