// SPDX-License-Identifier: Apache-2.0
// Admission on the CPU (table/admission.h): keys that a table lacks are listed and given to its candidates.
#include "table/admission.h"

#include <algorithm>

#include "cpu/contents.h"
#include "table/dynamic_table.h"

namespace sok::cpu {
namespace {

// The slots of candidates, -1: it is none, because a call counts for as many as there may be.
std::vector<int64_t> count(const sok_context& context, const std::vector<int64_t>& keys, DynamicTable& candidates) {
  std::vector<int64_t> slots(keys.size(), -1);
  const int64_t n = std::min(static_cast<int64_t>(keys.size()), candidates.index().capacity());
  if (n > 0) candidates.find_or_insert(context, {keys.data(), n, true}, slots.data());
  return slots;
}

}  // namespace

void allow_keys(const sok_context& context, const std::vector<HashRequest>& requests, const AdmissionRule& rule,
                DynamicTable* candidates) {
  std::vector<uint8_t*> allowed;
  std::vector<int64_t> keys;
  for (const HashRequest& request : requests) {
    for (int64_t i = 0; i < request.keys.size; ++i) {
      request.allowed[i] = 1;
      if (request.slots[i] >= 0) continue;
      keys.push_back(integer_at(request.keys, i));
      allowed.push_back(request.allowed + i);
    }
  }
  std::vector<int64_t> slots;
  if (candidates != nullptr) slots = count(context, keys, *candidates);
  for (size_t i = 0; i < keys.size(); ++i) {
    const bool is_counted =
        candidates == nullptr ||
        (slots[i] >= 0 && Uses::rank_of(candidates->eviction()->scores()[slots[i]]) >= rule.threshold);
    *allowed[i] = is_counted && rule.passes_filter(keys[i]) ? 1 : 0;
  }
}

void forget_candidates(const sok_context& context, const std::vector<HashRequest>& requests, DynamicTable& candidates) {
  std::vector<int64_t> keys;
  for (const HashRequest& request : requests) {
    for (int64_t i = 0; i < request.keys.size; ++i) {
      if (request.is_new[i] != 0 && request.allowed[i] != 0) keys.push_back(integer_at(request.keys, i));
    }
  }
  std::vector<int64_t> slots(keys.size());
  const auto n = static_cast<int64_t>(keys.size());
  if (n > 0) candidates.erase(context, {keys.data(), n, true}, slots.data());
}

}  // namespace sok::cpu
