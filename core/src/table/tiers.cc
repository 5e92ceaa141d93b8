// SPDX-License-Identifier: Apache-2.0
// Dynamic tables in two memories: which rows come, in a call and ahead of one.
#include "table/tiers.h"

#include <algorithm>
#include <map>
#include <utility>

#include "common/memory.h"
#include "table/dynamic_table.h"

using namespace sok;  // NOLINT: of this file only

int64_t sok_dynamic_table::host_bytes() const {
  int64_t bytes = 0;
  for (const Column& column : columns_) bytes += column.memory->host_bytes();
  return bytes;
}

TierRequest sok_dynamic_table::tier_request(std::vector<TierRequest::Slots> slots) {
  freed_ = generation_;  // as far as gradients of rows that move are concerned
  std::vector<TierRequest::Column> columns;
  columns.reserve(columns_.size());
  for (const Column& column : columns_) columns.push_back({column.memory->data(), column.bytes_of(1)});
  return {index_.get(),       eviction_.get(), tiers_.get(),
          std::move(columns), since(),         static_cast<int32_t>(generation_),
          std::move(slots)};
}

namespace sok {

void bring_rows([[maybe_unused]] const sok_context& context, const std::vector<DynamicTable*>& tables,
                const std::vector<HashRequest>& requests) {
  std::map<DynamicTable*, std::vector<TierRequest::Slots>> of_tables;
  for (size_t i = 0; i < tables.size(); ++i) {
    if (tables[i]->tiers() != nullptr) of_tables[tables[i]].push_back({requests[i].slots, requests[i].keys.size});
  }
  std::vector<TierRequest> found;
  found.reserve(of_tables.size());
  for (auto& [table, slots] : of_tables) found.push_back(table->tier_request(std::move(slots)));
#ifdef SOK_WITH_CUDA
  if (!found.empty()) cuda::bring_rows(context, found, false);
#endif
}

void prefetch([[maybe_unused]] const sok_context& context, const std::vector<DynamicTable*>& tables,
              const std::vector<Integers>& keys) {
  std::vector<DynamicTable*> meant;
  std::vector<Integers> asked;
  std::vector<Tiers*> tiers;
  for (size_t i = 0; i < tables.size(); ++i) {
    if (tables[i]->tiers() == nullptr || keys[i].size == 0) continue;
    if (tables[i]->is_at_last_generation()) continue;  // a step beside it may be comparing their numbers
    meant.push_back(tables[i]);
    asked.push_back(keys[i]);
    if (std::find(tiers.begin(), tiers.end(), tables[i]->tiers()) == tiers.end()) tiers.push_back(tables[i]->tiers());
  }
  if (meant.empty()) return;
#ifdef SOK_WITH_CUDA
  cuda::ahead(context, tiers, asked, [&](const sok_context& beside, const std::vector<Integers>& copies) {
    int64_t num_keys = 0;
    for (const Integers& each : copies) num_keys += each.size;
    const Buffer<int64_t> slots(beside, num_keys);
    std::vector<HashRequest> requests;
    std::map<DynamicTable*, std::vector<TierRequest::Slots>> of_tables;
    int64_t* next = slots.data();
    for (size_t i = 0; i < meant.size(); ++i) {
      requests.push_back({&meant[i]->index(), copies[i], next, nullptr});
      of_tables[meant[i]].push_back({next, copies[i].size});
      next += copies[i].size;
    }
    cuda::hash_find(beside, requests);
    std::vector<TierRequest> found;
    for (auto& [table, its_slots] : of_tables) {
      table->begin_ahead(beside);
      found.push_back(table->tier_request(std::move(its_slots)));
    }
    cuda::bring_rows(beside, found, true);
  });
#endif
}

}  // namespace sok
