// SPDX-License-Identifier: Apache-2.0
// Evaluation: rows that lookups name by key.
#ifndef SOK_CPU_ROWS_OF_CALL_H_
#define SOK_CPU_ROWS_OF_CALL_H_

#include <cstdint>
#include <vector>

#include "common/call.h"
#include "common/memory.h"
#include "common/row_source.h"

namespace sok::cpu {

// Where the rows of a call's lookups are. Keys of tables with an index (sok_columns::index) are found. Those that a
// table lacks get initial rows in memory of this object's, and only these: the others are read where they are.
class RowsOfCall {
 public:
  RowsOfCall(const sok_context& context, const std::vector<Columns>& tables, const std::vector<Lookup>& lookups);

  // One for each lookup, as long as this lives.
  const std::vector<RowSource>& sources() const { return sources_; }

 private:
  std::vector<RowSource> sources_;
  Buffer<int64_t> numbers_;
  std::vector<Buffer<char>> initial_;  // of each lookup by key
};

}  // namespace sok::cpu

#endif  // SOK_CPU_ROWS_OF_CALL_H_
