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
#include "table/initial_value.h"

namespace sok {

// What decides on a key that a table lacks, in one call.
struct AdmissionRule {
  static constexpr double kAll = 0x1p32;         // as `limit`
  static constexpr uint32_t kDraw = UINT32_MAX;  // beside those of initial values

  int64_t threshold;  // of calls
  double limit;       // of the filter's draws
  uint64_t seed;
  uint32_t generation;

  SOK_HOST_DEVICE bool passes_filter(int64_t key) const {
    return limit >= kAll || philox(seed, generation, kDraw, static_cast<uint64_t>(key)).word[0] < limit;
  }
};

class Admission {
 public:
  static bool refuses(const sok_admission& config) { return config.threshold > 1 || config.filter_ratio < 1; }

  // Of a table made by `table`. Throws Error, as everything here that may fail.
  explicit Admission(const sok_dynamic_table_config& table);
  ~Admission();

  // Whether some keys may get no row in a call that filters or does not.
  bool decides(bool filters) const { return candidates_ != nullptr || (filters && config_.filter_ratio < 1); }

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
  const sok_admission config_;
  const uint64_t seed_;
  std::unique_ptr<sok_dynamic_table> candidates_;
};

}  // namespace sok

namespace sok::cpu {

// Admission::decide and forget_admitted; candidates nullptr: none wait.
void allow_keys(const sok_context& context, const std::vector<HashRequest>& requests, const AdmissionRule& rule,
                sok_dynamic_table* candidates);
void forget_candidates(const sok_context& context, const std::vector<HashRequest>& requests,
                       sok_dynamic_table& candidates);

}  // namespace sok::cpu

#ifdef SOK_WITH_CUDA
namespace sok::cuda {

void allow_keys(const sok_context& context, const std::vector<HashRequest>& requests, const AdmissionRule& rule,
                sok_dynamic_table* candidates);
void forget_candidates(const sok_context& context, const std::vector<HashRequest>& requests,
                       sok_dynamic_table& candidates);

}  // namespace sok::cuda
#endif

#endif  // SOK_TABLE_ADMISSION_H_
