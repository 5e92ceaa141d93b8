// SPDX-License-Identifier: Apache-2.0
// What a device found wrong in the contents of tensors: plain numbers that a kernel writes and the host words later.
#ifndef SOK_COMMON_ERROR_RECORD_H_
#define SOK_COMMON_ERROR_RECORD_H_

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/status.h"
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
  kExchange = 8,    // no fault of a device: an exchange was ended before it was complete
  kPeer = 9,        // rank `value` has failed
  kFull = 10,       // more keys than the `limit` that an index takes; it holds `value`
  kCollision = 11,  // more keys with hashes that are nearly the same than the `limit` that an index takes
  kLostKey = 12,    // slot `value` has lost its key since generation `limit`
  kScore = 13,      // scores[limit] is `value`, which is none
  kManyKeys = 14,   // a call has more different keys than `limit`, which an index takes by giving up all others
  kManyGuests = 15  // a step has more different keys without rows than the `limit` of slots that there are for them
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

// What the host alone knows of a record that outlives a call.
struct RecordKeeper {
  explicit RecordKeeper(int32_t device) : device(device) {}

  const int32_t device;
  std::mutex emptying;
  TableNames names;
};

}  // namespace sok

// Memory that a device and the host write to, each its own words: the two have no atomic operations in common
// everywhere. The thread of a device that changes `taken` from 0 writes the finding; what others find is lost.
struct sok_error_record {
  alignas(8) uint32_t taken;  // the device's: 1 where it has found something
  int32_t ended;              // the host's: sok::Fault, where it has found something itself
  int32_t fault;              // the device's: sok::Fault, of the finding
  int32_t table;              //   Finding::table, value and limit
  int64_t value, limit;
  sok::RecordKeeper* keeper;  // the host's; NULL in a record of one call
  int32_t rank, num_ranks;    // the host's: whose rows are inserted; 0 of 0 before any are
};

namespace sok {

// Whether anything was found. Any thread.
bool is_full(const sok_error_record& record);

// What a record says that the device has come past; nothing where it is empty. Any thread.
Finding find_recorded(const sok_error_record& record);

// Notes who inserts rows with this record. Any thread.
void set_rank(sok_error_record* record, int32_t rank, int32_t num_ranks);

// Runs `call`. An error of a capacity says which rank it is of, where there are several: each has its own.
template <typename Call>
void naming_rank(int32_t rank, int32_t num_ranks, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    if (error.code() != SOK_RESOURCE_EXHAUSTED || num_ranks <= 1) throw;
    fail(error.code(), error.message(), ". This is rank ", rank, " of ", num_ranks);
  }
}

// Throws the Error of a finding; does nothing for none. table_name NULL: the number is given.
void throw_found(const Finding& found, const char* table_name);

}  // namespace sok

#endif  // SOK_COMMON_ERROR_RECORD_H_
