// SPDX-License-Identifier: Apache-2.0
// Rows in two memories on the device (table/tiers.h).
#ifndef SOK_CUDA_TIERS_H_
#define SOK_CUDA_TIERS_H_

#include <cstdint>
#include <memory>

#include "table/tiers.h"

namespace sok::cuda {

// In page-locked memory; the device adds to them, a call after the other.
struct TierCounts {
  int64_t device_hits, host_hits, moves;
};

class Tiers final : public sok::Tiers {
 public:
  Tiers(int64_t device_rows, std::unique_ptr<ReservedRange> bits);
  ~Tiers() override;

  void add_counts(sok_dynamic_table_counts& counts) const override;
  void join(const sok_context& context) override;

  // Beside the steps.
  void* stream() const { return stream_.get(); }
  // Makes it wait for what is enqueued on `stream`.
  void wait_for(void* stream);
  // What is enqueued on `stream` is prefetching.
  void set_pending(void* stream);

  // Two words for each 32 slots from device_rows on: which are wanted, 0 between calls; which the running step uses.
  // Enqueues what makes them so in the step after the one that ended with generation `step`.
  uint32_t* bits(void* stream, int64_t step);
  TierCounts* counts() const { return counts_.get(); }

 private:
  using Handle = std::unique_ptr<void, void (*)(void*) noexcept>;

  const std::unique_ptr<TierCounts, void (*)(void*) noexcept> counts_;
  const Handle stream_, before_, done_;  // events
  int64_t step_ = -1;
  int64_t cleared_ = 0;  // bytes
};

}  // namespace sok::cuda

#endif  // SOK_CUDA_TIERS_H_
