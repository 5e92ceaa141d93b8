// SPDX-License-Identifier: Apache-2.0
// Eviction on the device (table/eviction.h). A call that inserts into an index that may be full gives up rows in
// batches: how many, the device alone knows. It takes valid candidates of the queue first; where these are too few, a
// sweep finds as many more, and fills the queue. The host knows of how many candidates the device is sure, and enqueues
// a sweep, which the device passes over where it needs none, only where they may run out.
#ifndef SOK_CUDA_EVICTION_H_
#define SOK_CUDA_EVICTION_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "common/memory.h"
#include "cuda/context.h"
#include "table/eviction.h"

namespace sok::cuda {

// Slots are numbers of 32 bits where rows are evicted.
constexpr int64_t kMaxEvictingRows = UINT32_MAX;
constexpr int64_t kQueueChunk = 1024;  // candidates that a block looks at together

struct Candidate {
  int64_t score, slot;
};

// How many candidates were valid when so much had been spent. A unit is a key of a call or whatever else may use up a
// candidate, or change its score.
struct Sure {
  int64_t valid, spent;
};

// On the device, as long as the index. Candidates are those from `head` to `end`, the next to go first.
struct Queue {
  int64_t head, end;
  Sure sure;
};

// What becomes of an index in a call.
struct Plan {
  int64_t need;       // rows to give up
  int64_t num_slots;  // that were given out before
  // Of the queue: chunks that were handed out to blocks, valid candidates in them, and where the next ones begin.
  uint32_t tickets;
  unsigned long long found;
  int64_t head;
  // Of a sweep, which looks for `wanted` rows.
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
  int64_t capacity, share;
  Candidate* candidates;
  Queue* queue;
  Sure* news;        // in the host's memory
  int64_t num_keys;  // of the call
  int64_t spent;     // after the call
  // nullptr: the index is not full after the call. Else the rows that go have a place for each key of the call.
  Plan* plan;
  uint32_t* sums;  // of chunks of the queue: valid candidates
  int64_t *slots, *keys, *old_scores;
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
  Eviction(sok_device device, sok_eviction strategy, int64_t half_life, int64_t capacity,
           std::unique_ptr<ReservedRange> scores);
  ~Eviction() override;

  int64_t bytes() const override { return sok::Eviction::bytes() + candidates_->backed_bytes(); }
  void forget(const sok_context& context, const int64_t* slots, int64_t n) override;
  void forget_all(const sok_context& context, int64_t num_slots) override;
  int64_t set(const sok_context& context, const char* table, int64_t num_slots, const int64_t* slots,
              const int64_t* scores, int64_t n) override;

  // Of a call that brings `num_keys`, once. Rows may go in it, where its index may be full.
  EvictionView view(int64_t num_keys, bool may_be_full);
  // Whether the queue may have too few for the call. To be asked before `view`.
  bool may_run_out(int64_t num_keys) const;
  int64_t num_chunks() const { return (share_ + kQueueChunk - 1) / kQueueChunk; }

 private:
  void halve_counts(const sok_context& context, int64_t num_slots) override;
  void free_memory() noexcept;

  const int64_t capacity_, share_;
  std::unique_ptr<ReservedRange> candidates_;  // Candidate [share]
  Queue* queue_ = nullptr;
  Sure* news_ = nullptr;
  int64_t spent_ = 0;
  int64_t max_rank_ = 0;  // that a score may have
};

// Takes valid candidates of the queues, in the order in which they stand there, as far as the plans need them.
// Enqueues.
void take_queued(const Scope& scope, const EvictionView* views, int64_t num_views, int64_t max_chunks);

// Of an index whose queue had too few, the rest. *is_shut becomes 2, and is reported for the table of this number,
// where not enough rows may go. Enqueues.
void sweep(const Scope& scope, const EvictionView& view, int32_t* is_shut, int32_t number, sok_error_record* errors);

}  // namespace sok::cuda

#endif  // SOK_CUDA_EVICTION_H_
