// SPDX-License-Identifier: Apache-2.0
#include "lookups.h"

namespace sok_torch {

LookupLists select(const LookupLists& lookups, const std::vector<int64_t>& wanted) {
  LookupLists result;
  std::vector<int64_t> place(lookups.keys.size(), -1);
  for (const int64_t i : wanted) {
    place[i] = static_cast<int64_t>(result.keys.size());
    result.keys.push_back(lookups.keys[i]);
    result.key_tables.push_back(lookups.key_tables[i]);
    result.combiners.push_back(lookups.combiners[i]);
  }
  const auto move = [&place](const std::vector<at::Tensor>& from, const std::vector<int64_t>& positions,
                             std::vector<at::Tensor>* tensors, std::vector<int64_t>* places) {
    for (size_t j = 0; j < positions.size(); ++j) {
      if (place[positions[j]] < 0) continue;
      tensors->push_back(from[j]);
      places->push_back(place[positions[j]]);
    }
  };
  move(lookups.row_splits, lookups.bagged, &result.row_splits, &result.bagged);
  move(lookups.weights, lookups.weighted, &result.weights, &result.weighted);
  return result;
}

}  // namespace sok_torch
