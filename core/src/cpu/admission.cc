// SPDX-License-Identifier: Apache-2.0
#include "table/admission.h"

#include <algorithm>
#include <string>

#include "cpu/contents.h"
#include "table/initial_value.h"

namespace sok {

using cpu::integer_at;

namespace {

constexpr uint32_t kFilterDraw = UINT32_MAX;  // beside those of initial values

}  // namespace

Admission::Admission(const sok_admission& config, const sok_hash_index_config& index, uint64_t seed)
    : config_(config), seed_(seed) {
  if (config.threshold <= 1) return;
  const std::string name = std::string(index.name != nullptr ? index.name : "table") + " (candidates)";
  sok_hash_index_config candidates = SOK_HASH_INDEX_CONFIG_INIT;
  candidates.device = index.device;
  candidates.capacity = config.max_candidates > 0 ? config.max_candidates : index.capacity;
  candidates.name = name.c_str();
  candidates_ = make_hash_index(candidates);
  const sok_reserved_range_config range = {sizeof(range), index.device, candidates.capacity * int64_t{sizeof(int64_t)},
                                           name.c_str()};
  counts_ = std::make_unique<Eviction>(SOK_EVICT_LFU, 0, reserve_range(range));
}

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
    const std::vector<int64_t> slots = count(context, keys, generation);
    for (size_t i = 0; i < keys.size(); ++i)
      *allowed[i] = slots[i] >= 0 && Eviction::rank_of(counts_->scores()[slots[i]]) >= config_.threshold ? 1 : 0;
  }
  if (!filters) return;
  const double limit = config_.filter_ratio * 0x1p32;
  for (size_t i = 0; i < keys.size(); ++i) {
    const Draw draw = philox(seed_, static_cast<uint32_t>(generation), kFilterDraw, static_cast<uint64_t>(keys[i]));
    if (draw.word[0] >= limit) *allowed[i] = 0;
  }
}

// The slots of candidates, -1: it is none, because a call counts for as many as there may be.
std::vector<int64_t> Admission::count(const sok_context& context, const std::vector<int64_t>& keys,
                                      int64_t generation) {
  std::vector<int64_t> slots(keys.size(), -1);
  const int64_t n = std::min(static_cast<int64_t>(keys.size()), candidates_->capacity());
  counts_->grow(std::min(candidates_->num_slots() + n, candidates_->capacity()));
  counts_->end_step();
  counts_->begin(context, generation, candidates_->num_slots());
  cpu::hash_find_or_insert(context,
                           {{candidates_.get(), {keys.data(), n, true}, slots.data(), nullptr, counts_.get()}});
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
  cpu::hash_erase(context, {{candidates_.get(), {keys.data(), n, true}, slots.data(), nullptr}});
  counts_->forget(slots.data(), n);
}

void Admission::clear(const sok_context& context) {
  if (candidates_ == nullptr) return;
  counts_->forget_all(candidates_->num_slots());
  candidates_->clear(context);
}

int64_t Admission::bytes() const { return candidates_ == nullptr ? 0 : candidates_->bytes() + counts_->bytes(); }

}  // namespace sok
