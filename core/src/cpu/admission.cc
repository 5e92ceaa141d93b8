// SPDX-License-Identifier: Apache-2.0
#include "table/admission.h"

#include <algorithm>
#include <string>

#include "cpu/contents.h"
#include "table/dynamic_table.h"
#include "table/initial_value.h"

namespace sok {

using cpu::integer_at;

namespace {

constexpr uint32_t kFilterDraw = UINT32_MAX;  // beside those of initial values

}  // namespace

Admission::Admission(const sok_dynamic_table_config& table) : config_(table.admission), seed_(table.initializer.seed) {
  if (config_.threshold <= 1) return;
  const std::string name = std::string(table.index.name != nullptr ? table.index.name : "table") + " (candidates)";
  sok_dynamic_table_config candidates = SOK_DYNAMIC_TABLE_CONFIG_INIT;
  candidates.index.device = table.index.device;
  candidates.index.capacity = config_.max_candidates > 0 ? config_.max_candidates : table.index.capacity;
  candidates.index.name = name.c_str();
  candidates.dimension = 1;
  candidates.eviction = SOK_EVICT_LFU;
  candidates_ = std::make_unique<sok_dynamic_table>(candidates);
}

Admission::~Admission() = default;

void Admission::decide(const sok_context& context, const std::vector<HashRequest>& requests, int64_t generation,
                       bool filters) {
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
  if (candidates_ != nullptr) {
    const std::vector<int64_t> slots = count(context, keys);
    for (size_t i = 0; i < keys.size(); ++i)
      *allowed[i] =
          slots[i] >= 0 && Uses::rank_of(candidates_->eviction()->scores()[slots[i]]) >= config_.threshold ? 1 : 0;
  }
  if (!filters) return;
  const double limit = config_.filter_ratio * 0x1p32;
  for (size_t i = 0; i < keys.size(); ++i) {
    const Draw draw = philox(seed_, static_cast<uint32_t>(generation), kFilterDraw, static_cast<uint64_t>(keys[i]));
    if (draw.word[0] >= limit) *allowed[i] = 0;
  }
}

// The slots of candidates, -1: it is none, because a call counts for as many as there may be.
std::vector<int64_t> Admission::count(const sok_context& context, const std::vector<int64_t>& keys) {
  std::vector<int64_t> slots(keys.size(), -1);
  const int64_t n = std::min(static_cast<int64_t>(keys.size()), candidates_->index().capacity());
  candidates_->end_step();
  if (n > 0) candidates_->find_or_insert(context, {keys.data(), n, true}, slots.data());
  return slots;
}

void Admission::forget_admitted(const sok_context& context, const std::vector<HashRequest>& requests) {
  if (candidates_ == nullptr) return;
  std::vector<int64_t> keys;
  for (const HashRequest& request : requests) {
    for (int64_t i = 0; i < request.keys.size; ++i) {
      if (request.is_new[i] != 0 && request.allowed[i] != 0) keys.push_back(integer_at(request.keys, i));
    }
  }
  std::vector<int64_t> slots(keys.size());
  const auto n = static_cast<int64_t>(keys.size());
  if (n > 0) candidates_->erase(context, {keys.data(), n, true}, slots.data());
}

void Admission::clear(const sok_context& context) {
  if (candidates_ != nullptr) candidates_->clear(context);
}

int64_t Admission::bytes() const { return candidates_ == nullptr ? 0 : candidates_->bytes(); }

}  // namespace sok
