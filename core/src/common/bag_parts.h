// SPDX-License-Identifier: Apache-2.0
// The parts of bags that are pooled at their owners (sok/messages.h), and where they lie in what travels.
#ifndef SOK_COMMON_BAG_PARTS_H_
#define SOK_COMMON_BAG_PARTS_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "common/call.h"

namespace sok {

// The parts of one lookup's bags on one rank.
struct BagPart {
  int32_t rank = 0;
  int32_t lookup = 0;  // among those that are pooled at their owners
  int64_t num_bags = 0;
  int64_t first_split = 0;    // in the row splits of all parts
  int64_t first_element = 0;  // in the messages of floats
};

// What the sum of a bag is multiplied with.
SOK_HOST_DEVICE inline float bag_scale(int32_t combiner, int64_t num_keys) {
  if (combiner == SOK_SUM) return 1.0f;
  const float total = static_cast<float>(num_keys);
  const float divisor = combiner == SOK_MEAN ? total : sqrtf(total);
  return divisor == 0.0f ? 0.0f : 1.0f / divisor;
}

// Of a bag of a lookup with these row splits; nullptr: each key is a bag.
SOK_HOST_DEVICE inline float bag_scale(int32_t combiner, const int64_t* row_splits, int64_t bag) {
  return bag_scale(combiner, row_splits == nullptr ? 1 : row_splits[bag + 1] - row_splits[bag]);
}

class BagParts {
 public:
  // For every rank that a lookup's table lives on. rows: elements of rows in the message of each rank, before the sums;
  // empty: not known yet.
  BagParts(const std::vector<Table>& tables, const std::vector<Lookup>& lookups, int32_t num_ranks,
           const std::vector<int64_t>& rows = {});

  // In send order.
  const std::vector<BagPart>& parts() const { return parts_; }
  int64_t num_splits() const { return num_splits_; }
  // Elements of the messages of floats.
  int64_t num_elements() const { return num_elements_; }
  // Elements of sums in the message of each rank.
  const std::vector<int64_t>& sums() const { return sums_; }

 private:
  std::vector<BagPart> parts_;
  std::vector<int64_t> sums_;
  int64_t num_splits_ = 0, num_elements_ = 0;
};

}  // namespace sok

#endif  // SOK_COMMON_BAG_PARTS_H_
