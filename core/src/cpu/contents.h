// SPDX-License-Identifier: Apache-2.0
// Checks of what tensors contain, on the CPU.
#ifndef SOK_CPU_CONTENTS_H_
#define SOK_CPU_CONTENTS_H_

#include <algorithm>
#include <cstdint>

#include "common/call.h"
#include "common/error_record.h"
#include "common/parallel.h"
#include "common/status.h"
#include "common/tensor.h"
#include "cpu/isa.h"

namespace sok::cpu {

inline int64_t integer_at(const Integers& integers, int64_t i) {
  return integers.is_64bit ? static_cast<const int64_t*>(integers.data)[i]
                           : static_cast<const int32_t*>(integers.data)[i];
}

// Row splits begin with 0 and end with the number of entries; check_splits looks at those between.
inline void check_split_ends(const int64_t* row_splits, int64_t num_bags, int64_t num_entries, const Label& label) {
  if (row_splits == nullptr) return;
  SOK_CHECK(row_splits[0] == 0, label, " begins with ", row_splits[0], ", must begin with 0");
  SOK_CHECK(row_splits[num_bags] == num_entries, label, " ends with ", row_splits[num_bags],
            ", must end with the number of keys, ", num_entries);
}

// Of bags [begin, end): afterwards their splits are in [0, num_entries] and do not decrease.
inline void check_splits(const int64_t* row_splits, int64_t begin, int64_t end, int64_t num_entries,
                         const Label& label) {
  if (row_splits == nullptr) return;
  const int64_t bad = kernels().find_bad_split(row_splits, begin, end, num_entries);
  SOK_CHECK(bad < 0, label, " must rise from 0 to ", num_entries, " but ", row_splits[bad], " is followed by ",
            row_splits[bad + 1], " at ", bad);
}

// Numbers [begin, end) must be in [0, limit).
inline void check_numbers(const TableId& table, Fault fault, const Integers& numbers, int64_t limit, int64_t begin,
                          int64_t end) {
  const int64_t bad = kernels().find_outside(numbers.data, numbers.is_64bit, begin, end, static_cast<uint64_t>(limit));
  if (bad >= 0) throw_found({fault, table.number, integer_at(numbers, bad), limit}, table.name);
}

inline void check_keys(const Table& table, const Integers& keys, int64_t begin, int64_t end) {
  if (table.placement.num_rows == Placement::kAnyKey) return;
  check_numbers(table, Fault::kKey, keys, table.placement.num_rows, begin, end);
}

inline void check_slots(const Columns& table, const Integers& slots, int64_t begin, int64_t end) {
  check_numbers(table, Fault::kSlot, slots, table.num_slots, begin, end);
}

// Bytes that a task should read and write when all tasks do `total`: small enough that workers end together, large
// enough that the first rows of a task, which nothing asked for ahead, do not count.
inline int64_t task_bytes(const sok_context& context, int64_t total) {
  return std::clamp<int64_t>(total / (8 * num_workers(context)), 1 << 16, 1 << 19);
}

inline int64_t items_per_task(int64_t task_bytes, int64_t item_bytes) {
  return std::max<int64_t>(1, task_bytes / std::max<int64_t>(1, item_bytes));
}

}  // namespace sok::cpu

#endif  // SOK_CPU_CONTENTS_H_
