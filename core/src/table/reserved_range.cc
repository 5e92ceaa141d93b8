// SPDX-License-Identifier: Apache-2.0
#include "table/reserved_range.h"

#include <algorithm>
#include <limits>

#include "common/status.h"

namespace {

// A chunk is one in kShare of the bytes that are backed, the largest share at most, so that a range that grows by
// single rows asks for memory seldom. Where whole chunks go back none is larger: what grew at once has to shrink too.
constexpr int64_t kShare = 8;

}  // namespace

sok_reserved_range::sok_reserved_range(const sok_reserved_range_config& config, int64_t page, int64_t largest_share,
                                       bool whole_chunks)
    : name_(config.name != nullptr ? config.name : "range"),
      device_(config.device),
      page_(page),
      largest_share_(largest_share),
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
      const int64_t share = std::clamp(backed_ / kShare / page_ * page_, page_, largest_share_);
      const int64_t lacking = round_up(bytes - backed_);
      int64_t chunk = std::min(chunk_for(share, lacking), left);
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

int64_t sok_reserved_range::chunk_for(int64_t share, int64_t lacking) const {
  if (whole_chunks_) return share;
  if (share < largest_share_) return std::max(share, lacking);
  const int64_t past = (reinterpret_cast<intptr_t>(data_) + backed_ + lacking) % largest_share_;
  return past == 0 ? lacking : lacking + largest_share_ - past;
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
