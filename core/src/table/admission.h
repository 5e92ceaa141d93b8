// SPDX-License-Identifier: Apache-2.0
// Which new keys get rows in a dynamic table (sok_admission in sok/dynamic_table.h).
//
// Keys that wait for a row are candidates: keys of a table of their own, whose scores count the calls that asked for
// them (LFU, table/eviction.h). Where there are too many, those with the lowest scores go.
#ifndef SOK_TABLE_ADMISSION_H_
#define SOK_TABLE_ADMISSION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "sok/context.h"
#include "sok/dynamic_table.h"
#include "table/hash_index.h"

namespace sok {

class Admission {
 public:
  static bool refuses(const sok_admission& config) { return config.threshold > 1 || config.filter_ratio < 1; }

  // Of a table made by `table`. Throws Error, as everything here that may fail.
  explicit Admission(const sok_dynamic_table_config& table);
  ~Admission();

  // Of the keys of one call to one table, whose slots say which it lacks: `allowed` becomes 0 at those that get no row,
  // 1 elsewhere. The call counts once for each key that is lacking.
  void decide(const sok_context& context, const std::vector<HashRequest>& requests, int64_t generation, bool filters);
  // The call is over, and keys that are new in it have rows: they are candidates no more.
  void forget_admitted(const sok_context& context, const std::vector<HashRequest>& requests);
  void clear(const sok_context& context);

  int64_t bytes() const;
  // nullptr: none wait.
  sok_dynamic_table* candidates() const { return candidates_.get(); }

 private:
  std::vector<int64_t> count(const sok_context& context, const std::vector<int64_t>& keys);

  const sok_admission config_;
  const uint64_t seed_;
  std::unique_ptr<sok_dynamic_table> candidates_;
};

}  // namespace sok

#endif  // SOK_TABLE_ADMISSION_H_
