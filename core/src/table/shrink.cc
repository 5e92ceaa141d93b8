// SPDX-License-Identifier: Apache-2.0
// A dynamic table gives memory back: its rows move to the lowest slots, and its index is made anew for as many keys.
#include <algorithm>
#include <utility>

#include "api/dispatch.h"
#include "api/on_device.h"
#include "common/memory.h"
#include "common/status.h"
#include "table/dynamic_table.h"
#include "table/shrink.h"

using namespace sok;  // NOLINT: of this file only

namespace {

constexpr int64_t kTemporaryBytes = int64_t{64} << 20;

}  // namespace

std::unique_ptr<sok_hash_index> sok_dynamic_table::compacted(const sok_context& context, int64_t size,
                                                             int64_t* old_slots) const {
  constexpr int64_t kSlotsOfCall = int64_t{1} << 24;
  sok_context own = context;
  own.errors = nullptr;  // what does not fit is known at once
  const Buffer<int64_t> keys(context, size);
  const Buffer<int64_t> slots(context, std::min(size, kSlotsOfCall)), count(context, 1);
  int64_t found = 0;
  for (int64_t first = 0; first < index_->num_slots() && found < size; first += kSlotsOfCall) {
    index_->export_slots(own, first, std::min(kSlotsOfCall, index_->num_slots() - first), keys.data() + found,
                         old_slots + found, count.data());
    found += SOK_DISPATCH(own, fetch, count.data());
  }
  auto result = make_hash_index(
      {sizeof(sok_hash_index_config), index_->device(), index_->capacity(), size, index_->name().c_str()},
      index_->max_guests());
  for (int64_t first = 0; first < size; first += kSlotsOfCall) {
    const std::vector<HashRequest> requests = {
        {result.get(), {keys.data() + first, std::min(kSlotsOfCall, size - first), true}, slots.data(), nullptr}};
    SOK_DISPATCH(own, hash_find_or_insert, requests);
  }
  SOK_CHECK_STATUS(SOK_INTERNAL, found == size && result->size(own) == size, "table '", index_->name(), "' has ", found,
                   " keys in ", size, " slots");
  return result;
}

int64_t sok_dynamic_table::shrink(const sok_context& context) {
  const int64_t before = bytes();
  if (admission_ != nullptr && admission_->candidates() != nullptr) admission_->candidates()->shrink(context);
  index_->release_guests(context, 0, since());
  const int64_t size = index_->size(context);
  const Buffer<int64_t> old_slots(context, size);
  int64_t widest = kTemporaryBytes;
  for (const Column& column : columns_) widest = std::max(widest, column.bytes_of(1));
  const Buffer<char> temporary(context, context.device.type == SOK_CUDA ? widest : 0);
  auto index = compacted(context, size, old_slots.data());
  advance(context);  // the last that may fail
  for (const Column& column : columns_)
    SOK_DISPATCH(context, move_rows, column.memory->data(), column.bytes_of(1), old_slots.data(), size, temporary);
  if (eviction_ != nullptr) {
    auto* const scores = reinterpret_cast<char*>(eviction_->scores());
    SOK_DISPATCH(context, move_rows, scores, int64_t{sizeof(int64_t)}, old_slots.data(), size, temporary);
    eviction_->forget_queue(context);
  }
  SOK_DISPATCH(context, set_generations, nullptr, size, {since(), static_cast<int32_t>(generation_)});
  freed_ = generation_;
  next_to_expire_ = 0;
  index_->size(context);  // on CUDA it waits: nothing uses what goes
  before_shrink_ = counts();
  before_shrink_.insertions -= index->num_insertions();
  index_ = std::move(index);
  index_->set_tiers(tiers_.get());
  since_->shrink(size * kSinceBytes);
  for (const Column& column : columns_) column.memory->shrink(column.bytes_of(size));
  if (eviction_ != nullptr) eviction_->shrink(size);
  index_->limit_slots(backed_slots());
  return std::max<int64_t>(0, before - bytes());
}
