// SPDX-License-Identifier: Apache-2.0
// Which rows a dynamic table gives up when it is full (sok_eviction in sok/dynamic_table.h), for every backend.
//
// Every slot has a score: in its upper half what the strategy ranks rows by, in its lower half the generation in which
// the row was last used, which ranks those that are equal there. The lowest scores go first, of equal ones the lowest
// slots. A sweep over all scores finds many that are the next to go; they stand in a queue, and one whose score has
// changed since is passed over. Rows that the running step uses are swept only where there are no others.
#ifndef SOK_TABLE_EVICTION_H_
#define SOK_TABLE_EVICTION_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "common/call.h"
#include "common/host_device.h"
#include "sok/context.h"
#include "sok/dynamic_table.h"
#include "table/reserved_range.h"

namespace sok {

// What a use makes of a score.
struct Uses {
  static constexpr int kUsedBits = 32;
  static constexpr int64_t kMaxRank = INT32_MAX - 1;
  static constexpr int kCountBits = 20;  // of a rank by epoch and count
  static constexpr int64_t kMaxCount = (int64_t{1} << kCountBits) - 1;
  static constexpr int64_t kMaxEpoch = 2047 - 1;

  sok_eviction strategy = SOK_EVICT_NOTHING;
  int64_t epoch = 0;
  int64_t generation = 0;  // of the running call

  SOK_HOST_DEVICE static int64_t rank_of(int64_t score) { return score >> kUsedBits; }
  SOK_HOST_DEVICE static int64_t last_use_of(int64_t score) { return score & INT64_C(0xffffffff); }
  SOK_HOST_DEVICE static int64_t score_of(int64_t rank, int64_t last_use) { return rank << kUsedBits | last_use; }
  SOK_HOST_DEVICE static bool is_score(int64_t score) {
    return score >= 0 && rank_of(score) <= kMaxRank && last_use_of(score) < INT32_MAX - 1;
  }
  // With the number of its last use lower, 0 at least; not of kNoKey.
  SOK_HOST_DEVICE static int64_t lowered(int64_t score, int64_t by) {
    const int64_t last_use = last_use_of(score);
    return score - (last_use < by ? last_use : by);
  }

  SOK_HOST_DEVICE int64_t again(int64_t score) const {
    const int64_t rank = rank_of(score);
    switch (strategy) {
      case SOK_EVICT_NOTHING:
      case SOK_EVICT_LRU:
      case SOK_EVICT_CUSTOMIZED:
        break;
      case SOK_EVICT_LFU:
        return score_of(least(rank + 1, kMaxRank), generation);
      case SOK_EVICT_EPOCH_LRU:
        return score_of(least(epoch, kMaxRank), generation);
      case SOK_EVICT_EPOCH_LFU:
        return score_of(least(epoch, kMaxEpoch) << kCountBits | least((rank & kMaxCount) + 1, kMaxCount), generation);
    }
    return score_of(rank, generation);
  }
  SOK_HOST_DEVICE int64_t first() const { return again(0); }
  // In which a row was used last; 0 where nothing goes by epoch.
  int64_t epoch_of(int64_t rank) const {
    if (strategy == SOK_EVICT_EPOCH_LRU) return rank;
    return strategy == SOK_EVICT_EPOCH_LFU ? rank >> kCountBits : 0;
  }
  // With half the count.
  SOK_HOST_DEVICE int64_t halved(int64_t score) const {
    const int64_t rank = rank_of(score), counts = strategy == SOK_EVICT_EPOCH_LFU ? kMaxCount : kMaxRank | 1;
    return score_of((rank & ~counts) | (rank & counts) >> 1, last_use_of(score));
  }

 private:
  SOK_HOST_DEVICE static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
};

class Eviction {
 public:
  static constexpr int64_t kNoKey = INT64_MAX;  // the score of a slot without a key

  // Of an index of so many keys. scores: of all slots that there may be.
  Eviction(sok_eviction strategy, int64_t half_life, int64_t capacity, std::unique_ptr<ReservedRange> scores)
      : share_(std::max<int64_t>(1, capacity / 64)), half_life_(half_life), scores_(std::move(scores)) {
    uses_.strategy = strategy;
  }
  virtual ~Eviction() = default;
  Eviction(const Eviction&) = delete;
  Eviction& operator=(const Eviction&) = delete;

  int64_t* scores() const { return reinterpret_cast<int64_t*>(scores_->data()); }
  virtual int64_t bytes() const { return scores_->backed_bytes(); }
  void set_epoch(int64_t epoch) { uses_.epoch = epoch; }
  // Scores tell no more than the last uses where nothing is evicted.
  bool evicts() const { return uses_.strategy != SOK_EVICT_NOTHING; }

  // Throws Error, as what follows.
  void grow(int64_t slots) { scores_->grow(slots * int64_t{sizeof(int64_t)}); }
  // Takes memory from what no slots use; nothing may use it.
  void shrink(int64_t slots) { scores_->shrink(slots * int64_t{sizeof(int64_t)}); }
  // Begins a call that inserts; `num_slots` slots have been given out.
  void begin(const sok_context& context, int64_t generation, int64_t num_slots) {
    const bool is_due = half_life_ > 0 && generation / half_life_ > uses_.generation / half_life_;
    uses_.generation = generation;
    if (is_due) halve_counts(context, num_slots);
  }
  // The slots have no key any more; -1 among them is none.
  virtual void forget(const sok_context& context, const int64_t* slots, int64_t n) = 0;
  virtual void forget_all(const sok_context& context, int64_t num_slots) = 0;
  // Scores have got other slots: the next that goes is to be looked for anew.
  virtual void forget_queue(const sok_context& context) = 0;
  // marks[i], for i in [0, n): 1 where slot first + i has a key whose last use was not after generation `last`, else 0.
  // next_slot: of the index. False: there is none; on a device, where the host does not know, true.
  virtual bool find_unused(const sok_context& context, int64_t first, int64_t n, int64_t last, const int64_t* next_slot,
                           uint8_t* marks) const = 0;
  // Gives slots scores, but those that have no key, goes on from the latest epoch among them and returns the latest
  // generation. Where it throws, nothing has changed.
  virtual int64_t set(const sok_context& context, const char* table, int64_t num_slots, const int64_t* slots,
                      const int64_t* scores, int64_t n) = 0;

  // The scores have been lowered by so many generations.
  void lower_generations(const sok_context& context, int64_t by) {
    for (int64_t* const number : {&uses_.generation, &step_, &freed_}) *number = std::max<int64_t>(0, *number - by);
    forget_queue(context);
  }
  // What was used until now may go.
  void end_step() { step_ = uses_.generation; }
  // Rows have got scores of generations up to this one.
  void go_on_from(int64_t generation) {
    uses_.generation = generation;
    end_step();
  }
  // The last generation of the step before the running one.
  int64_t step() const { return step_; }
  // The last generation in which it may have given up a row.
  int64_t freed() const { return freed_; }

 protected:
  virtual void halve_counts(const sok_context& context, int64_t num_slots) = 0;
  // Rows have got ranks up to this one.
  void go_on_from_rank(int64_t rank) { uses_.epoch = std::max(uses_.epoch, uses_.epoch_of(rank)); }

  const int64_t share_;  // a sweep finds so many rows, or a multiple of it, where there are so many
  Uses uses_;
  int64_t step_ = 0;  // the last generation of the step before the running one
  int64_t freed_ = 0;

 private:
  const int64_t half_life_;
  const std::unique_ptr<ReservedRange> scores_;
};

// For an index of so many keys and slots at most. A CUDA device is the current one, also when it is destroyed. Throws
// Error.
std::unique_ptr<Eviction> make_eviction(sok_device device, sok_eviction strategy, int64_t half_life, int64_t capacity,
                                        int64_t most_slots, std::unique_ptr<ReservedRange> scores);

}  // namespace sok

#ifdef SOK_WITH_CUDA
namespace sok::cuda {

std::unique_ptr<sok::Eviction> make_eviction(sok_device device, sok_eviction strategy, int64_t half_life,
                                             int64_t capacity, int64_t most_slots,
                                             std::unique_ptr<ReservedRange> scores);

}  // namespace sok::cuda
#endif

#endif  // SOK_TABLE_EVICTION_H_
