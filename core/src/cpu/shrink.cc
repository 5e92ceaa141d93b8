// SPDX-License-Identifier: Apache-2.0
// What takes memory from a dynamic table.
#include <cstring>

#include "table/shrink.h"

namespace sok::cpu {

void move_rows(const sok_context&, char* rows, int64_t row_bytes, const int64_t* slots, int64_t n,
               const Buffer<char>&) {
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] != i) std::memcpy(rows + i * row_bytes, rows + slots[i] * row_bytes, static_cast<size_t>(row_bytes));
  }
}

int64_t fetch(const sok_context&, const int64_t* number) { return *number; }

}  // namespace sok::cpu
