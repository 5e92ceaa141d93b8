// SPDX-License-Identifier: Apache-2.0
// What a device found wrong in the contents of tensors: plain numbers that a kernel writes and the host words later.
#ifndef SOK_COMMON_ERROR_RECORD_H_
#define SOK_COMMON_ERROR_RECORD_H_

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

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
  kRouting = 7,     // an entry number of routing.order outside [0, limit), or unique_splits that do not ascend
  kExchange = 8     // no fault of a device: an exchange was ended before it was complete
};

// The names of the tables of all calls that were given a record. A device can only report a number: the calls of a step
// have different tables, and when the number is read their names are gone.
class TableNames {
 public:
  // Any thread. The same name has the same number.
  int32_t number_of(const char* name);
  // Any thread. nullptr for a number that was never given out.
  const char* name_of(int32_t number);

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, int32_t> numbers_;
  std::vector<const char*> names_;  // keys of numbers_, which stay where they are
};

}  // namespace sok

// Memory that the device writes to. `claimed` decides between threads that find something at the same time; `fault` is
// written last.
struct sok_error_record {
  int32_t fault;  // sok::Fault
  int32_t claimed;
  int32_t table;  // Table::number
  int32_t reserved;
  int64_t value;
  int64_t limit;
  sok::TableNames* names;  // the host's; NULL in a record of one call
};

namespace sok {

// Throws the Error that the record describes; does nothing for an empty one. table_name NULL: the number is given.
void throw_recorded(const sok_error_record& record, const char* table_name);

}  // namespace sok

#endif  // SOK_COMMON_ERROR_RECORD_H_
