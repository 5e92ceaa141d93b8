// SPDX-License-Identifier: Apache-2.0
// What a device found wrong in the contents of tensors: plain numbers that a kernel writes and the host words later.
#ifndef SOK_COMMON_ERROR_RECORD_H_
#define SOK_COMMON_ERROR_RECORD_H_

#include <cstdint>

#include "sok/context.h"
#include "sok/table.h"

namespace sok {

enum class Fault : int32_t {
  kNone = 0,
  kKey = 1,         // a key outside [0, limit)
  kForeignKey = 2,  // a key that belongs to rank `limit`, not to this one
  kSlot = 3,        // a slot outside [0, limit)
  kRowSplits = 4,   // row_splits that are not 0 = s[0] <= s[1] <= ... = limit; `value` is the bag where it shows
  kBag = 5,         // a row of bags_from_coordinates outside [0, limit)
  kOffset = 6,      // an `inverse` outside the exchanged rows of `limit` elements
  kRouting = 7      // an entry number of routing.order outside [0, limit), or unique_splits that do not ascend
};

}  // namespace sok

// Memory that the device writes to. `claimed` decides between threads that find something at the same time; `fault` is
// written last.
struct sok_error_record {
  int32_t fault;  // sok::Fault
  int32_t claimed;
  int32_t table;  // position in the call
  int32_t reserved;
  int64_t value;
  int64_t limit;
};

namespace sok {

// Throws the Error that the record describes; does nothing for an empty one.
void throw_recorded(const sok_error_record& record, const char* table_name);

}  // namespace sok

#endif  // SOK_COMMON_ERROR_RECORD_H_
