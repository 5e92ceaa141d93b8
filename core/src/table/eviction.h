// SPDX-License-Identifier: Apache-2.0
// Which rows a dynamic table gives up when it is full (sok_eviction in sok/dynamic_table.h).
//
// Every slot has a score: in its upper half what the strategy ranks rows by, in its lower half the generation in which
// the row was last used, which ranks those that are equal there. The lowest scores go first, of equal ones the lowest
// slots. A sweep over all scores finds many that are the next to go; they stand in a queue, and one whose score has
// changed since is passed over.
#ifndef SOK_TABLE_EVICTION_H_
#define SOK_TABLE_EVICTION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "common/call.h"
#include "sok/context.h"
#include "sok/dynamic_table.h"
#include "table/reserved_range.h"

namespace sok {

class Eviction {
 public:
  static constexpr int64_t kNoKey = INT64_MAX;  // the score of a slot without a key

  static int64_t rank_of(int64_t score) { return score >> 32; }
  static int64_t last_use_of(int64_t score) { return score & INT64_C(0xffffffff); }
  static bool is_score(int64_t score) {
    return score >= 0 && score >> 32 < INT32_MAX && last_use_of(score) < INT32_MAX - 1;
  }

  // scores: of the table's capacity.
  Eviction(sok_eviction strategy, int64_t half_life, std::unique_ptr<ReservedRange> scores);

  int64_t* scores() const { return reinterpret_cast<int64_t*>(scores_->data()); }
  int64_t bytes() const { return scores_->backed_bytes(); }
  // Throws Error.
  void grow(int64_t slots) { scores_->grow(slots * int64_t{sizeof(int64_t)}); }
  void set_epoch(int64_t epoch) { epoch_ = epoch; }

  // Begins a call that inserts; `num_slots` slots have been given out.
  void begin(const sok_context& context, int64_t generation, int64_t num_slots);
  // Rows that the running call uses; -1 among them is none.
  void use(const sok_context& context, const int64_t* slots, int64_t n);
  // The slot has a new key.
  void use_first(int64_t slot) { scores()[slot] = used_once(); }
  // The slots have no key any more.
  void forget(const int64_t* slots, int64_t n);
  void forget_all(int64_t num_slots);

  // Gives slots scores, but those that have no key, and returns the latest generation among them. Throws Error, with
  // nothing changed.
  int64_t set(const TableId& table, int64_t num_slots, const int64_t* slots, const int64_t* scores, int64_t n);

  bool evicts() const { return strategy_ != SOK_EVICT_NOTHING; }
  // A slot whose row is to go: none that the running step uses where there is another, and never one that the running
  // call uses. -1: there is none.
  int64_t next(const sok_context& context, int64_t num_slots);
  // Takes `next` back: the score that the slot had.
  void restore(int64_t slot, int64_t score);
  // A row that went: the slot, and the key and score that it had there.
  struct Row {
    int64_t slot, key, score;
  };
  // What the running call evicted, in the order in which it did.
  void commit(const std::vector<Row>& evicted) {
    evicted_ = evicted;
    num_evicted_ += static_cast<int64_t>(evicted.size());
  }
  const std::vector<Row>& evicted() const { return evicted_; }
  int64_t num_evicted() const { return num_evicted_; }
  // What was used until now may go.
  void end_step() { step_ = generation_; }
  // Rows have got scores of generations up to this one.
  void go_on_from(int64_t generation) {
    generation_ = generation;
    end_step();
  }

 private:
  struct Candidate {
    int64_t score, slot;
    bool operator<(const Candidate& other) const {
      return score != other.score ? score < other.score : slot < other.slot;
    }
  };

  int64_t used_again(int64_t score) const;
  int64_t used_once() const { return used_again(0); }
  void halve_counts(const sok_context& context, int64_t num_slots);
  // Fills the queue with the lowest scores among rows that were last used in `last` or before.
  void sweep(const sok_context& context, int64_t num_slots, int64_t last);
  // The k-th lowest score among these, or kNoKey where there are fewer.
  int64_t find_lowest(const sok_context& context, int64_t num_slots, int64_t last, int64_t k) const;

  const sok_eviction strategy_;
  const int64_t half_life_;
  const std::unique_ptr<ReservedRange> scores_;
  int64_t generation_ = 0;
  int64_t step_ = 0;  // the last generation of the step before the running one
  int64_t epoch_ = 0;
  int64_t num_evicted_ = 0;
  std::vector<Row> evicted_;
  std::vector<Candidate> queue_;  // the next to go is the last
};

}  // namespace sok

#endif  // SOK_TABLE_EVICTION_H_
