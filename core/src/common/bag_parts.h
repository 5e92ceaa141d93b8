// SPDX-License-Identifier: Apache-2.0
// The parts of bags that are pooled at their owners (sok/owner_pooling.h), and where they lie in what travels.
#ifndef SOK_COMMON_BAG_PARTS_H_
#define SOK_COMMON_BAG_PARTS_H_

#include <cstdint>
#include <vector>

#include "common/call.h"

namespace sok {

// The parts of one lookup's bags on one rank.
struct BagPart {
  int32_t rank = 0;
  int32_t lookup = 0;
  int64_t num_bags = 0;
  int64_t first_split = 0;    // in the flat row splits
  int64_t first_element = 0;  // in the flat sums
};

class BagParts {
 public:
  // For every rank that a lookup's table lives on.
  BagParts(const std::vector<Table>& tables, const std::vector<Lookup>& lookups, int32_t num_ranks);

  // In send order.
  const std::vector<BagPart>& parts() const { return parts_; }
  int64_t num_splits() const { return num_splits_; }
  int64_t num_elements() const { return num_elements_; }
  // The number of a lookup's first bag among those of the call; first_bag(number of lookups): bags of the call.
  int64_t first_bag(size_t lookup) const { return first_bags_[lookup]; }

 private:
  std::vector<BagPart> parts_;
  std::vector<int64_t> first_bags_;
  int64_t num_splits_ = 0, num_elements_ = 0;
};

}  // namespace sok

#endif  // SOK_COMMON_BAG_PARTS_H_
