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

// What was found wrong.
struct Finding {
  Fault fault = Fault::kNone;
  int32_t table = 0;  // Table::number
  int64_t value = 0;
  int64_t limit = 0;
};

constexpr int kFindingPieces = 6;  // fault, table, value and limit in 32 bits each

}  // namespace sok

// Memory that the device writes to. Of the calls that find something the first one, which `call` decides, writes the
// finding of its lowest place: of a place that is lower than those before, each piece replaces the one that is there.
struct sok_error_record {
  int32_t fault;                         // sok::Fault, of whatever was found; a finding is there when it is not 0
  uint32_t call;                         // who writes the pieces: CallErrors::call, or kHost
  uint64_t pieces[sok::kFindingPieces];  // UINT32_MAX - place in the upper half; the greatest stays
  uint32_t calls;                        // the host's: how many were given this record
  uint32_t reserved;
  sok::TableNames* names;  // the host's; NULL in a record of one call
};

namespace sok {

// What a kernel reports to. `call` is never 0.
struct CallErrors {
  static constexpr uint32_t kHost = UINT32_MAX;  // no call: the host itself

  sok_error_record* record;
  uint32_t call;
};

// What a record that is not empty says. A device may be writing a lower place while it is read: then that one.
Finding find_recorded(const sok_error_record& record);

// Throws the Error of a finding; does nothing for none. table_name NULL: the number is given.
void throw_found(const Finding& found, const char* table_name);

}  // namespace sok

#endif  // SOK_COMMON_ERROR_RECORD_H_
