// SPDX-License-Identifier: Apache-2.0
#include "cpu/eviction.h"

#include <algorithm>
#include <atomic>

#include "common/error_record.h"
#include "common/parallel.h"

namespace sok::cpu {
namespace {

constexpr int64_t kAhead = 16;  // rows whose scores are asked for before they are used
constexpr int64_t kSlotsPerTask = 1 << 16;

constexpr int kDigitBits = 16;
constexpr int64_t kDigits = int64_t{1} << kDigitBits;

Chunks chunks_of(int64_t n) {
  Chunks chunks;
  chunks.add(n, kSlotsPerTask);
  return chunks;
}

}  // namespace

void Eviction::halve_counts(const sok_context& context, int64_t num_slots) {
  const Chunks chunks = chunks_of(num_slots);
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    for (int64_t i = range.begin; i < range.end; ++i) {
      int64_t& score = scores()[i];
      if (score != kNoKey) score = uses_.halved(score);
    }
  });
}

void Eviction::use(const int64_t* slots, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n && slots[i + kAhead] >= 0) __builtin_prefetch(scores() + slots[i + kAhead], 1);
    if (slots[i] < 0) continue;
    // A row is used once a call, however often its key occurs there: all threads that write its score write the same.
    const std::atomic_ref<int64_t> score(scores()[slots[i]]);
    const int64_t held = score.load(std::memory_order_relaxed);
    if (Uses::last_use_of(held) != uses_.generation) score.store(uses_.again(held), std::memory_order_relaxed);
  }
}

void Eviction::forget(const sok_context&, const int64_t* slots, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] >= 0) scores()[slots[i]] = kNoKey;
  }
}

void Eviction::forget_all(const sok_context&, int64_t num_slots) {
  std::fill_n(scores(), num_slots, kNoKey);
  queue_.clear();
}

bool Eviction::find_unused(const sok_context&, int64_t first, int64_t n, int64_t last, const int64_t*,
                           uint8_t* marks) const {
  bool any = false;
  for (int64_t i = 0; i < n; ++i) {
    marks[i] = Uses::last_use_of(scores()[first + i]) <= last ? 1 : 0;
    any = any || marks[i] != 0;
  }
  return any;
}

void Eviction::restore(int64_t slot, int64_t score) {
  scores()[slot] = score;
  queue_.clear();  // where it stood in it is not known
}

int64_t Eviction::set(const sok_context&, const char* table, int64_t num_slots, const int64_t* slots,
                      const int64_t* scores, int64_t n) {
  int64_t latest = 0, most = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] >= num_slots) throw_found({Fault::kSlot, 0, slots[i], num_slots}, table);
    if (!Uses::is_score(scores[i])) throw_found({Fault::kScore, 0, scores[i], i}, table);
    latest = std::max(latest, Uses::last_use_of(scores[i]));
    most = std::max(most, Uses::rank_of(scores[i]));
  }
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] >= 0 && this->scores()[slots[i]] != kNoKey) this->scores()[slots[i]] = scores[i];
  }
  go_on_from_rank(most);
  return latest;
}

int64_t Eviction::next(const sok_context& context, int64_t num_slots) {
  const auto pop = [&]() -> int64_t {
    while (!queue_.empty()) {
      const Candidate candidate = queue_.back();
      queue_.pop_back();
      if (scores()[candidate.slot] == candidate.score) return candidate.slot;
    }
    return -1;
  };
  int64_t slot = pop();
  for (const int64_t last : {step_, uses_.generation - 1}) {
    if (slot >= 0) break;
    sweep(context, num_slots, last);
    slot = pop();
  }
  return slot;
}

void Eviction::sweep(const sok_context& context, int64_t num_slots, int64_t last) {
  const int64_t threshold = num_slots > kSlotsPerTask ? find_lowest(context, num_slots, last, share_) : kNoKey;
  const Chunks chunks = chunks_of(num_slots);
  std::vector<std::vector<Candidate>> found(static_cast<size_t>(chunks.count()));
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t score = scores()[i];
      if (score <= threshold && Uses::last_use_of(score) <= last)
        found[static_cast<size_t>(task)].push_back({score, i});
    }
  });
  queue_.clear();
  for (const std::vector<Candidate>& own : found) queue_.insert(queue_.end(), own.begin(), own.end());
  if (share_ < static_cast<int64_t>(queue_.size())) {
    std::nth_element(queue_.begin(), queue_.begin() + share_, queue_.end());
    queue_.resize(static_cast<size_t>(share_));
  }
  std::sort(queue_.rbegin(), queue_.rend());
}

// Digit by digit, from the highest, by counting.
int64_t Eviction::find_lowest(const sok_context& context, int64_t num_slots, int64_t last, int64_t k) const {
  const Chunks chunks = chunks_of(num_slots);
  const int64_t workers = num_workers(context);
  std::vector<int64_t> counts;
  int64_t found = 0;  // the upper digits
  for (int shift = 64 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    counts.assign(static_cast<size_t>(kDigits * workers), 0);
    parallel_for(context, chunks.count(), [&](int64_t task, int32_t worker) {
      const Chunks::Range range = chunks[task];
      int64_t* const own = counts.data() + kDigits * worker;
      for (int64_t i = range.begin; i < range.end; ++i) {
        const int64_t digits = scores()[i] >> shift;
        if (digits >> kDigitBits == found && Uses::last_use_of(scores()[i]) <= last) ++own[digits & (kDigits - 1)];
      }
    });
    int64_t digit = 0;
    for (; digit < kDigits; ++digit) {
      int64_t here = 0;
      for (int64_t worker = 0; worker < workers; ++worker)
        here += counts[static_cast<size_t>(kDigits * worker + digit)];
      if (k <= here) break;
      k -= here;
    }
    if (digit == kDigits) return kNoKey;
    found = found << kDigitBits | digit;
  }
  return found;
}

}  // namespace sok::cpu
