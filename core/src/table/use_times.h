// SPDX-License-Identifier: Apache-2.0
// When the generations of a dynamic table began, roughly.
#ifndef SOK_TABLE_USE_TIMES_H_
#define SOK_TABLE_USE_TIMES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace sok {

// Times are seconds of one clock.
class UseTimes {
 public:
  explicit UseTimes(double resolution) : resolution_(resolution) {}

  // A generation begins.
  void record(int64_t generation, double now) {
    if (!began_.empty() && now < began_.back().time + resolution_) return;
    if (began_.size() == kMost) {  // half of them tell as much of the past as is needed
      for (size_t i = 0; i < kMost / 2; ++i) began_[i] = began_[2 * i];
      began_.resize(kMost / 2);
    }
    began_.push_back({generation, now});
  }

  // A generation that had begun at this time, the latest that is known; 0: none is.
  int64_t begun_at(double time) const {
    const auto after = std::upper_bound(began_.begin(), began_.end(), time,
                                        [](double at, const Began& began) { return at < began.time; });
    return after == began_.begin() ? 0 : std::prev(after)->generation;
  }

 private:
  static constexpr size_t kMost = 1 << 16;
  struct Began {
    int64_t generation;
    double time;
  };

  const double resolution_;
  std::vector<Began> began_;  // ascending
};

}  // namespace sok

#endif  // SOK_TABLE_USE_TIMES_H_
