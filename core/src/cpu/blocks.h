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

  // `row_bytes` of a table, for tasks of about the same work.
  template <typename RowBytes>
  Blocks(const std::vector<Table>& tables, int32_t num_sources, const int64_t* counts, RowBytes&& row_bytes)
      : tables_(tables) {
    int64_t row = 0, element = 0;
    for (int32_t source = 0; source < num_sources; ++source) {
      for (size_t t = 0; t < tables.size(); ++t) {
        const int64_t count = *counts++;
        rows_.push_back(row);
        elements_.push_back(element);
        chunks_.add(count, items_per_task(row_bytes(tables[t])));
        row += count;
        element += count * tables[t].dimension;
      }
    }
    num_rows_ = row;
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
