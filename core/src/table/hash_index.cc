// SPDX-License-Identifier: Apache-2.0
#include "table/hash_index.h"

#include "table/tiers.h"

#include <algorithm>
#include <bit>

#include "common/parallel.h"
#include "common/status.h"
#include "common/tensor.h"

namespace sok {
namespace {

// Keys that a segment holds on average when a growth begins (80% of its entries), and when it is over (1 / 1.15).
// Hashes are even, so that it has nine times the standard deviation left.
constexpr int64_t kRowsAtStart = kSegmentEntries * 80 / 100;
constexpr int64_t kRowsAtEnd = kSegmentEntries * 100 / 115;

int shift_of(int64_t segments) {
  return std::max(0, static_cast<int>(std::bit_width(static_cast<uint64_t>(segments))) - 4);
}

// The least number of segments that a growth ends with and that takes `rows` keys, so many in each.
int64_t segments_for(int64_t rows, int64_t rows_of_each) {
  const int64_t least = std::max<int64_t>(1, ceil_div(rows, rows_of_each));
  const int64_t step = int64_t{1} << shift_of(least);
  return ceil_div(least, step) * step;
}

}  // namespace

// What never grows may have any number of segments.
HashSegments::HashSegments(int64_t rows, int64_t capacity)
    : most_(rows < capacity ? segments_for(capacity, kRowsAtEnd) : ceil_div(capacity, kRowsAtEnd)) {
  segments_ = std::min(segments_for(rows, kRowsAtStart), most_);
}

int HashSegments::shift() const { return shift_of(segments_); }

HashSpace HashSegments::space(void* buckets) const {
  const uint64_t segments = static_cast<uint64_t>(segments_);
  const uint64_t wider = static_cast<uint64_t>(is_growing() ? next() : segments_);
  // While it grows there are groups on both sides, so there are two of them at least.
  const uint64_t boundary = is_growing() ? static_cast<uint64_t>(group() + 1) << (64 - shift()) : 0;
  return {static_cast<HashBucket*>(buckets), segments, wider, boundary};
}

int64_t HashSegments::rows_of_move() const { return (segments_ >> shift()) * (kRowsAtEnd - kRowsAtStart); }

int64_t HashSegments::rows() const {
  return segments_ == most_ ? segments_ * kRowsAtEnd : segments_ * kRowsAtStart + moved_ * rows_of_move();
}

int64_t HashSegments::moves_before(int64_t rows) const {
  if (rows <= this->rows()) return 0;
  const int64_t moves = ceil_div(rows - segments_ * kRowsAtStart, rows_of_move());
  return segments_ == most_ ? 0 : std::min(num_groups(), moves) - moved_;
}

void HashSegments::move() {
  if (++moved_ < num_groups()) return;
  segments_ = next();
  moved_ = 0;
}

int64_t check_number_of_keys(int32_t num_requests, const sok_index_request* requests) {
  int64_t num_keys = 0;
  for (int32_t i = 0; i < num_requests; ++i) num_keys += requests[i].keys.shape[0];
  SOK_CHECK(num_keys <= kMaxEntries, num_keys, " keys; a call takes fewer than 2^31");
  return num_keys;
}

std::vector<HashRequest> hash_requests(int32_t num_requests, const sok_index_request* requests) {
  std::vector<HashRequest> result;
  check_number_of_keys(num_requests, requests);
  for (int32_t i = 0; i < num_requests; ++i) {
    const sok_tensor& keys = requests[i].keys;
    result.push_back({static_cast<sok_hash_index*>(requests[i].index->self),
                      {keys.data, keys.shape[0], keys.dtype == SOK_INT64},
                      requests[i].slots,
                      nullptr});
  }
  return result;
}

std::unique_ptr<sok_hash_index> make_hash_index(const sok_hash_index_config& config, int64_t max_guests) {
#ifdef SOK_WITH_CUDA
  if (config.device.type == SOK_CUDA) return cuda::make_hash_index(config, max_guests);
#endif
  return cpu::make_hash_index(config, max_guests);
}

void check_hash_index_config(const sok_hash_index_config& config) {
  SOK_CHECK(config.struct_size == sizeof(sok_hash_index_config), "config.struct_size is ", config.struct_size,
            ", must be ", sizeof(sok_hash_index_config));
  SOK_CHECK(config.capacity >= 1 && config.capacity <= kMaxHashRows, "config.capacity is ", config.capacity,
            ", must be in [1, 2^40]");
  SOK_CHECK(config.initial_rows >= 0 && config.initial_rows <= config.capacity, "config.initial_rows is ",
            config.initial_rows, ", must be in [0, ", config.capacity, "], the capacity");
}

std::vector<HashRequest> check_hash_requests(const sok_context& context, int32_t num_requests,
                                             const sok_hash_index_request* requests) {
  SOK_CHECK(num_requests >= 0, "num_requests is ", num_requests, ", must not be negative");
  SOK_CHECK(num_requests == 0 || requests != nullptr, "requests is NULL");
  std::vector<HashRequest> result;
  int64_t num_keys = 0;
  for (int32_t i = 0; i < num_requests; ++i) {
    const sok_hash_index_request& from = requests[i];
    const Label index{"requests", i, "index"};
    SOK_CHECK(from.index != nullptr, index, " is NULL");
    SOK_CHECK(from.index->device().type == context.device.type && from.index->device().index == context.device.index,
              index, " is on another device than the call");
    const auto label = [&](const char* field) { return Label{"requests", i, field, from.index->name().c_str()}; };
    HashRequest to = {from.index, check_integers(from.keys, label("keys"), kAnySize), nullptr, nullptr};
    to.slots = checked_data<int64_t>(from.slots, label("slots"), SOK_INT64, {to.keys.size});
    if (!is_absent(from.is_new)) {
      to.is_new = checked_data<uint8_t>(from.is_new, label("is_new"), SOK_UINT8, {to.keys.size});
    }
    SOK_CHECK(to.keys.size <= kMaxEntries - num_keys, label("keys"), ": ", to.keys.size,
              " keys; a call takes fewer than 2^31");
    num_keys += to.keys.size;
    result.push_back(to);
  }
  return result;
}

}  // namespace sok

sok_hash_index::sok_hash_index(const sok_hash_index_config& config, int64_t max_guests,
                               int (*locate)(const sok_context*, int32_t, const sok_index_request*, uint32_t))
    : segments_(config.initial_rows, config.capacity),
      name_(config.name != nullptr ? config.name : "table"),
      device_(config.device),
      capacity_(config.capacity),
      max_guests_(max_guests),
      seam_{sizeof(sok_index), this, locate} {}

void sok_hash_index::join(const sok_context& context) const {
  if (tiers_ != nullptr) tiers_->join(context);
}

sok_reserved_range_config sok_hash_index::range_config(int64_t bytes) const {
  return {sizeof(sok_reserved_range_config), device_, bytes, name_.c_str(), 0};
}
