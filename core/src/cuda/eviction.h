// SPDX-License-Identifier: Apache-2.0
// Eviction on the device (table/eviction.h). A call that inserts into an index that may be full gives up rows in
// batches: how many, the device alone knows. It takes valid candidates of the queue first; where these are too few, a
// sweep finds as many more, and fills the queue.
#ifndef SOK_CUDA_EVICTION_H_
#define SOK_CUDA_EVICTION_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "common/memory.h"
#include "cuda/context.h"
#include "table/eviction.h"

namespace sok::cuda {

// Slots are numbers of 32 bits where rows are evicted.
constexpr int64_t kMaxEvictingRows = UINT32_MAX;

struct Candidate {
  int64_t score, slot;
};

// On the device, as long as the index. Candidates are those from `head` to `end`, the next to go first.
struct Queue {
  int64_t head, end;
};

// What becomes of an index in a call.
struct Plan {
  int64_t need;       // rows to give up
  int64_t num_slots;  // that were given out before
  // Of the queue: chunks that were handed out to blocks, valid candidates in them, and where the next ones begin.
  uint32_t tickets;
  unsigned long long found;
  int64_t head;
  // Of a sweep, which looks for `wanted` rows; -1 where there are not enough.
  int64_t wanted;
  int64_t below, left;           // of them: with keys below the threshold, and equal to it
  unsigned long long threshold;  // its upper digits, until all are known
  int64_t taken;                 // rows that have been given up
};

// An index in a call; the device's copy lies beside its IndexView. scores nullptr: it gives up nothing.
struct EvictionView {
  Uses uses;
  int64_t step;  // the last generation of the step before the running one
  int64_t* scores;
  int64_t capacity, most_slots, share;
  Candidate* candidates;
  Queue* queue;
  int64_t num_keys;  // of the call
  // nullptr: the index is not full after the call. Else the rows that go have a place for each key of the call.
  Plan* plan;
  int64_t *slots, *keys, *old_scores;
  bool keeps_step;  // rows of the running step are not given up, and it is no error where there are no others
  // A key of a sweep has so many bits of a last use, below those of a rank and one for rows of the running step.
  int32_t used_bits, key_bits;

  SOK_HOST_DEVICE bool is_swept() const { return plan->found < static_cast<unsigned long long>(plan->need); }
  // The row of a candidate goes as number i. What comes later in the call does not find it.
  SOK_HOST_DEVICE void give_up(int64_t i, const Candidate& candidate) const {
    slots[i] = candidate.slot;
    old_scores[i] = candidate.score;
    scores[candidate.slot] = sok::Eviction::kNoKey;
  }
};

class Eviction final : public sok::Eviction {
 public:
  Eviction(sok_device device, sok_eviction strategy, int64_t half_life, int64_t capacity, int64_t most_slots,
           std::unique_ptr<ReservedRange> scores);
  ~Eviction() override;

  int64_t bytes() const override { return sok::Eviction::bytes() + candidates_->backed_bytes(); }
  void forget(const sok_context& context, const int64_t* slots, int64_t n) override;
  void forget_all(const sok_context& context, int64_t num_slots) override;
  void forget_queue(const sok_context& context) override;
  bool find_unused(const sok_context& context, int64_t first, int64_t n, int64_t last, const int64_t* next_slot,
                   uint8_t* marks) const override;
  int64_t set(const sok_context& context, const char* table, int64_t num_slots, const int64_t* slots,
              const int64_t* scores, int64_t n) override;

  // Of a call that brings `num_keys`, once. Rows may go in it, where its index may be full.
  EvictionView view(int64_t num_keys, bool may_be_full);

 private:
  void halve_counts(const sok_context& context, int64_t num_slots) override;

  const int64_t capacity_, most_slots_;
  std::unique_ptr<ReservedRange> candidates_;  // Candidate [share]
  Queue* queue_ = nullptr;
  int64_t max_rank_ = 0;  // that a score may have
};

// After the plans say how many: gives up the rows of the call's tables; views without a plan give up none. *is_shut
// becomes 2, and is reported for the table of this number, where not enough rows may go. Enqueues.
void give_up_rows(const Scope& scope, const std::vector<EvictionView>& views, const EvictionView* on_device,
                  const std::vector<int32_t>& numbers, int32_t* is_shut, sok_error_record* errors);

}  // namespace sok::cuda

#endif  // SOK_CUDA_EVICTION_H_
