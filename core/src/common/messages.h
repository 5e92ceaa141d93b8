// SPDX-License-Identifier: Apache-2.0
// Count matrices read (sok/messages.h).
#ifndef SOK_COMMON_MESSAGES_H_
#define SOK_COMMON_MESSAGES_H_

#include <cstdint>
#include <vector>

#include "common/bag_parts.h"
#include "common/call.h"
#include "sok/messages.h"

namespace sok {

// What one rank asks for of one table: some rows, or the sums of the bags of one lookup.
struct MessagePart {
  int32_t rank;
  int32_t table;
  int32_t lookup;  // -1: rows
  int64_t num_keys;
  int64_t num_values;     // vectors: as many as keys, or bags
  int64_t first_key;      // in the messages of keys of all ranks
  int64_t first_split;    // likewise, num_values + 1 of them; -1: rows
  int64_t first_element;  // in the messages of floats of all ranks
};

// In the order of the messages; rows without keys are left out, bags without keys are not. Throws for numbers that
// cannot be.
std::vector<MessagePart> read_parts(const sok_messages* messages);

// Some lookups of a call by where they are pooled, with their entries numbered anew.
struct SplitLookups {
  // pooled: one a lookup, not 0: at the owner; nullptr: none is.
  SplitLookups(const std::vector<Lookup>& lookups, const int32_t* pooled);

  std::vector<Lookup> at_requester, at_owner;
};

// Those of `all` that stand at the positions of these lookups in the call.
template <typename T>
std::vector<T> select(const std::vector<T>& all, const std::vector<Lookup>& lookups) {
  std::vector<T> selected;
  selected.reserve(lookups.size());
  for (const Lookup& lookup : lookups) selected.push_back(all[static_cast<size_t>(lookup.number)]);
  return selected;
}

// A call as its requester's count matrix tells of it.
struct Request {
  std::vector<int64_t> counts;  // [num_ranks, num_tables] unique keys; empty: not known
  SplitLookups lookups;
  BagParts parts;  // of lookups.at_owner
};

// messages: nullptr: all lookups are pooled at the requester. Throws unless the count matrix is of this call.
Request read_request(const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
                     const sok_messages* messages);

}  // namespace sok

#endif  // SOK_COMMON_MESSAGES_H_
