// SPDX-License-Identifier: Apache-2.0
// The rows that the entries of a lookup name by numbers: rows of a table by slot, or exchanged rows by offset.
#ifndef SOK_COMMON_ROW_SOURCE_H_
#define SOK_COMMON_ROW_SOURCE_H_

#include <cstdint>
#include <vector>

#include "common/call.h"
#include "common/error_record.h"

namespace sok {

struct RowSource {
  Floats rows;
  Integers numbers;            // of each entry: its row is rows + number * stride
  int64_t stride = 0;          // elements
  int64_t multiple = 0;        // rows begin at multiples of so many elements
  int64_t limit = 0;           // of the numbers
  Fault fault = Fault::kNone;  // what a number outside [0, limit) is
};

// One for each lookup.
std::vector<RowSource> rows_of_tables(const std::vector<Columns>& tables, const std::vector<Lookup>& lookups);
std::vector<RowSource> check_exchanged_rows(const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
                                            const sok_tensor& inverse, const sok_tensor& floats);

}  // namespace sok

#endif  // SOK_COMMON_ROW_SOURCE_H_
