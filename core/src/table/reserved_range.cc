// SPDX-License-Identifier: Apache-2.0
#include "table/reserved_range.h"

#include <algorithm>
#include <limits>

#include "common/status.h"

namespace {

// A chunk is one in kShare of the bytes that are backed, kLargestShare bytes at most, so that a range that grows by
// single rows asks for memory seldom. Where whole chunks go back none is larger: what grew at once has to shrink too.
constexpr int64_t kShare = 8;
constexpr int64_t kLargestShare = int64_t{1} << 30;

}  // namespace

sok_reserved_range::sok_reserved_range(const sok_reserved_range_config& config, int64_t page, bool whole_chunks)
    : name_(config.name != nullptr ? config.name : "range"),
      device_(config.device),
      page_(page),
      whole_chunks_(whole_chunks),
      reserved_((config.bytes - 1) / page * page + page),
      device_bytes_(config.device.type == SOK_CUDA && config.device_bytes > 0 ? round_up(config.device_bytes)
                                                                              : std::numeric_limits<int64_t>::max()) {}

void sok_reserved_range::grow(int64_t bytes) {
  SOK_CHECK_STATUS(SOK_RESOURCE_EXHAUSTED, bytes <= reserved_, name_, ": it has addresses for ", reserved_,
                   " bytes and cannot hold ", bytes, "; reserve more when it is made");
  const int64_t before = backed_;
  try {
    while (backed_ < bytes) {
      const int64_t left = std::min(reserved_, backed_ < device_bytes_ ? device_bytes_ : reserved_) - backed_;
      const int64_t share = std::clamp(backed_ / kShare / page_ * page_, page_, kLargestShare);
      const int64_t lacking = round_up(bytes - backed_);
      int64_t chunk = std::min(whole_chunks_ ? share : std::max(share, lacking), left);
      if (!back(backed_, chunk)) {
        SOK_CHECK_STATUS(SOK_RESOURCE_EXHAUSTED, lacking < chunk && back(backed_, lacking), name_, ": no memory for ",
                         bytes - before, " bytes more than the ", before, " that it has; ", advice());
        chunk = lacking;
      }
      backed_ += chunk;
    }
  } catch (...) {
    backed_ = give_back(before);
    throw;
  }
}

void sok_reserved_range::shrink(int64_t bytes) {
  if (round_up(bytes) < backed_) backed_ = give_back(round_up(bytes));
}

namespace sok {

std::unique_ptr<ReservedRange> reserve_range(const sok_reserved_range_config& config) {
#ifdef SOK_WITH_CUDA
  if (config.device.type == SOK_CUDA) return cuda::reserve_range(config);
#endif
  return cpu::reserve_range(config);
}

}  // namespace sok
