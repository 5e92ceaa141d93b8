// SPDX-License-Identifier: Apache-2.0
// When the generations of a dynamic table began, roughly.
#ifndef SOK_TABLE_USE_TIMES_H_
#define SOK_TABLE_USE_TIMES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sok/dynamic_table.h"

namespace sok {

// Times are nanoseconds of UTC since 1970.
class UseTimes {
 public:
  explicit UseTimes(int64_t resolution) : resolution_(resolution) {}

  // A generation begins. Where the clock went back, or is behind that of another host, it began when the last one did.
  void record(int64_t generation, int64_t now) {
    if (!began_.empty()) now = std::max({now, began_.back().time, latest_.time});
    if (!began_.empty() && now < began_.back().time + resolution_) {
      latest_ = {generation, now};
      return;
    }
    // After a pause what came before it is not to be taken for what comes after.
    if (has_latest() && now >= latest_.time + resolution_) add(latest_);
    add({generation, now});
    latest_ = {};
  }

  // A generation that had begun at this time, the latest that is known; 0: none is.
  int64_t begun_at(int64_t time) const {
    if (has_latest() && latest_.time <= time) return latest_.generation;
    const auto after = std::upper_bound(began_.begin(), began_.end(), time,
                                        [](int64_t at, const sok_use_time& began) { return at < began.time; });
    return after == began_.begin() ? 0 : std::prev(after)->generation;
  }

  // All that are known, ascending.
  std::vector<sok_use_time> known() const {
    std::vector<sok_use_time> result = began_;
    if (has_latest()) result.push_back(latest_);
    return result;
  }

  void clear() {
    began_.clear();
    latest_ = {};
  }

  // Their numbers become lower. Of what is 0 then nothing is known.
  void lower_generations(int64_t by) {
    const std::vector<sok_use_time> before = known();
    clear();
    for (const sok_use_time& began : before) {
      if (began.generation > by) record(began.generation - by, began.time);
    }
  }

 private:
  static constexpr size_t kMost = 1 << 16;

  bool has_latest() const { return latest_.generation > 0; }

  void add(const sok_use_time& began) {
    if (began_.size() + 1 == kMost) {  // half of them tell as much of the past as is needed
      for (size_t i = 0; i < kMost / 2; ++i) began_[i] = began_[2 * i];
      began_.resize(kMost / 2);
    }
    began_.push_back(began);
  }

  const int64_t resolution_;
  std::vector<sok_use_time> began_;  // ascending
  sok_use_time latest_ = {};         // after the last of them; generation 0: none
};

}  // namespace sok

#endif  // SOK_TABLE_USE_TIMES_H_
