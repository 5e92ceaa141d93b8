// SPDX-License-Identifier: Apache-2.0
// Eviction on the CPU (table/eviction.h): rows go one at a time, each when a key takes its slot.
#ifndef SOK_CPU_EVICTION_H_
#define SOK_CPU_EVICTION_H_

#include <vector>

#include "table/eviction.h"

namespace sok::cpu {

class Eviction final : public sok::Eviction {
 public:
  using sok::Eviction::Eviction;

  void forget(const sok_context& context, const int64_t* slots, int64_t n) override;
  void forget_all(const sok_context& context, int64_t num_slots) override;
  void forget_queue(const sok_context&) override { queue_.clear(); }
  bool find_unused(const sok_context& context, int64_t first, int64_t n, int64_t last, const int64_t* next_slot,
                   uint8_t* marks) const override;
  int64_t set(const sok_context& context, const char* table, int64_t num_slots, const int64_t* slots,
              const int64_t* scores, int64_t n) override;

  // Rows that the running call uses; -1 among them is none. Several threads may call it.
  void use(const int64_t* slots, int64_t n);
  // The slot has a new key.
  void use_first(int64_t slot) { scores()[slot] = uses_.first(); }

  // A slot whose row is to go: none that the running step uses where there is another, and never one that the running
  // call uses. -1: there is none.
  int64_t next(const sok_context& context, int64_t num_slots);
  // Takes `next` back: the score that the slot had.
  void restore(int64_t slot, int64_t score);
  // The running call has given up rows.
  void commit() { freed_ = uses_.generation; }

 private:
  struct Candidate {
    int64_t score, slot;
    bool operator<(const Candidate& other) const {
      return score != other.score ? score < other.score : slot < other.slot;
    }
  };

  void halve_counts(const sok_context& context, int64_t num_slots) override;
  // Fills the queue with the lowest scores among rows that were last used in `last` or before.
  void sweep(const sok_context& context, int64_t num_slots, int64_t last);
  // The k-th lowest score among these, or kNoKey where there are fewer.
  int64_t find_lowest(const sok_context& context, int64_t num_slots, int64_t last, int64_t k) const;

  std::vector<Candidate> queue_;  // the next to go is the last
};

}  // namespace sok::cpu

#endif  // SOK_CPU_EVICTION_H_
