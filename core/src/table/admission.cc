// SPDX-License-Identifier: Apache-2.0
#include "table/admission.h"

#include <string>

#include "api/dispatch.h"
#include "table/dynamic_table.h"

namespace sok {

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
  const AdmissionRule rule = {config_.threshold,
                              filters ? config_.filter_ratio * AdmissionRule::kAll : AdmissionRule::kAll, seed_,
                              static_cast<uint32_t>(generation)};
  if (candidates_ != nullptr) candidates_->end_step();
  SOK_DISPATCH(context, allow_keys, requests, rule, candidates_.get());
}

void Admission::forget_admitted(const sok_context& context, const std::vector<HashRequest>& requests) {
  if (candidates_ != nullptr) SOK_DISPATCH(context, forget_candidates, requests, *candidates_);
}

void Admission::clear(const sok_context& context) {
  if (candidates_ != nullptr) candidates_->clear(context);
}

int64_t Admission::bytes() const { return candidates_ == nullptr ? 0 : candidates_->bytes(); }

}  // namespace sok
