// SPDX-License-Identifier: Apache-2.0
// Phases of a sweep (cuda/give_up.cu), each by all blocks of a launch or by one, with barriers of all between them.
#ifndef SOK_CUDA_SWEEP_CUH_
#define SOK_CUDA_SWEEP_CUH_

#include <cub/block/block_scan.cuh>

#include "cuda/add_up.cuh"
#include "cuda/eviction.h"
#include "cuda/report.cuh"

namespace sok::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;

constexpr int kDigitBits = 11;  // of a threshold
constexpr int kDigits = 1 << kDigitBits;
constexpr int kSortBits = 8;  // of a pass of the sort
constexpr int kSortDigits = 1 << kSortBits;
static_assert(kSortDigits == kThreads);

constexpr int kSlotsOfWarp = 16 * kWarp;  // of a chunk
constexpr int64_t kSlotChunk = kSlotsOfWarp * kWarps;
constexpr int64_t kAtOnce = 8;           // scores on their way to a thread
constexpr uint64_t kNoRow = UINT64_MAX;  // the key of a slot whose row may not go

// What a table needs beside its view. Rows go in the order of keys: first those that the running step does not use, of
// either by rank and last use. A key has the bits of a score that are in use, which are few where ranks and generations
// are low.
struct Sweep {
  uint32_t* queue_sums;        // of chunks of the queue: valid candidates
  unsigned long long* counts;  // [kDigits]
  int64_t num_chunks;          // of slots
  uint32_t* sums;              // [2, num_chunks], of keys below the threshold, and equal to it
  uint64_t* keys[2];           // of rows that go or are candidates, and for a pass of the sort
  uint32_t* slots[2];
  uint32_t* digits;  // [kSortDigits, blocks]
  uint32_t* totals;  // [kSortDigits]
  int32_t number;    // of the table, in reports
};

__device__ __forceinline__ uint64_t key_of(const EvictionView& view, int64_t score) {
  const int64_t used = Uses::last_use_of(score);
  if (used >= view.uses.generation) return kNoRow;  // no key, or one of the running call
  const uint64_t key = static_cast<uint64_t>(Uses::rank_of(score) << view.used_bits | used);
  return key | (used > view.step ? uint64_t{1} << (view.key_bits - 1) : 0);
}
__device__ __forceinline__ int64_t score_of(const EvictionView& view, uint64_t key) {
  const auto score = static_cast<int64_t>(key & ((uint64_t{1} << (view.key_bits - 1)) - 1));
  return Uses::score_of(score >> view.used_bits, score & ((int64_t{1} << view.used_bits) - 1));
}

// Of a table of a launch: blocks are numbered from another one on for each table, so that those with little work are
// worked on side by side.
__device__ __forceinline__ uint32_t block_for(uint32_t table, uint32_t num_tables) {
  return (blockIdx.x + table * (gridDim.x / num_tables)) % gridDim.x;
}

// How many keys have each value of a digit, `width` bits from `shift` on, among those whose upper digits are the
// threshold's.
__device__ __forceinline__ void count_digits(const EvictionView& view, const Sweep& sweep, int shift, int width,
                                             uint32_t block) {
  __shared__ uint32_t counts[kDigits];
  if (block * kAtOnce * kThreads >= view.plan->num_slots) return;
  for (int digit = threadIdx.x; digit < kDigits; digit += kThreads) counts[digit] = 0;
  __syncthreads();
  const uint64_t upper = view.plan->threshold;
  const int64_t num_slots = view.plan->num_slots, stride = gridDim.x * kAtOnce * kThreads;
  // Neighbours are often alike: a thread counts a run of equal digits at once.
  uint32_t last = 0, run = 0;
  for (int64_t first = block * kAtOnce * kThreads; first < num_slots; first += stride) {
    int64_t scores[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t i = first + k * kThreads + threadIdx.x;
      scores[k] = i < num_slots ? view.scores[i] : Eviction::kNoKey;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const uint64_t key = key_of(view, scores[k]);
      if (key == kNoRow || key >> (shift + width) != upper) continue;
      const uint32_t digit = static_cast<uint32_t>(key >> shift) & ((1u << width) - 1u);
      if (digit != last && run > 0) {
        atomicAdd(&counts[last], run);
        run = 0;
      }
      last = digit;
      ++run;
    }
  }
  if (run > 0) atomicAdd(&counts[last], run);
  __syncthreads();
  for (int digit = threadIdx.x; digit < kDigits; digit += kThreads) {
    if (counts[digit] > 0) atomicAdd(&sweep.counts[digit], static_cast<unsigned long long>(counts[digit]));
  }
  __syncthreads();
}

// By one block: the digit of the threshold. Of the first digit the uppermost bit tells how many rows the running step
// does not use, and so how many are wanted: as many as are missing in whole shares, or all there are.
__device__ __forceinline__ void pick(const EvictionView& view, const Sweep& sweep, int shift, int width,
                                     int32_t* is_shut, sok_error_record* errors) {
  constexpr int kItems = kDigits / kThreads;
  using Scan = cub::BlockScan<int64_t, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  __shared__ int64_t unused;
  Plan& plan = *view.plan;
  int64_t counts[kItems], before[kItems], all;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    unsigned long long& count = sweep.counts[threadIdx.x * kItems + k];
    counts[k] = static_cast<int64_t>(count);
    count = 0;
  }
  Scan(storage).ExclusiveSum(counts, before, all);
  __syncthreads();
  if (shift + width == view.key_bits) {
    const int of_step = 1 << (width - 1);
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (static_cast<int>(threadIdx.x) * kItems + k == of_step) unused = before[k];
    }
    __syncthreads();
    const int64_t missing = plan.need - static_cast<int64_t>(plan.found), share = view.share;
    const auto shares = [&](int64_t rows, int64_t of) { return min(of, (rows + share - 1) / share * share); };
    if (threadIdx.x == 0) {
      plan.wanted = missing <= unused ? shares(missing, unused) : unused + shares(missing - unused, all - unused);
      if (view.keeps_step) plan.wanted = min(missing, unused);
      plan.left = plan.wanted;
      plan.below = 0;
      plan.threshold = 0;
      if (missing > all && !view.keeps_step) {
        report(errors, Fault::kManyKeys, sweep.number, view.capacity, view.capacity);
        *is_shut = 2;
        plan.wanted = -1;
      }
    }
    __syncthreads();
    if (missing > all && !view.keeps_step) return;
  }
  const int64_t left = plan.left;
  const unsigned long long upper = plan.threshold;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (left <= before[k] || left > before[k] + counts[k]) continue;
    plan.threshold = upper << width | (threadIdx.x * kItems + k);
    plan.left = left - before[k];
    plan.below += before[k];
  }
  __syncthreads();
}

// Counts the rows of each chunk that go or are candidates, or writes them, in the order of slots.
template <bool kWrites>
__device__ __forceinline__ void select(const EvictionView& view, const Sweep& sweep, uint32_t block) {
  __shared__ uint32_t below_of[kWarps], equal_of[kWarps];
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const unsigned before = (1u << lane) - 1u;
  const uint64_t threshold = view.plan->threshold;
  const int64_t num_below = view.plan->below, num_equal = view.plan->left, num_slots = view.plan->num_slots;
  for (int64_t chunk = block; chunk < sweep.num_chunks; chunk += gridDim.x) {
    const int64_t first = chunk * kSlotChunk + warp * kSlotsOfWarp;
    unsigned below[kSlotsOfWarp / kWarp], equal[kSlotsOfWarp / kWarp];
    uint32_t sum_below = 0, sum_equal = 0;
#pragma unroll
    for (int k = 0; k < kSlotsOfWarp / kWarp; ++k) {
      const int64_t i = first + k * kWarp + lane;
      const uint64_t key = i < num_slots ? key_of(view, view.scores[i]) : kNoRow;
      below[k] = __ballot_sync(kWholeWarp, key < threshold);
      equal[k] = __ballot_sync(kWholeWarp, key == threshold);
      sum_below += __popc(below[k]);
      sum_equal += __popc(equal[k]);
    }
    if (lane == 0) below_of[warp] = sum_below, equal_of[warp] = sum_equal;
    __syncthreads();
    if (kWrites) {
      int64_t at_below = sweep.sums[chunk], at_equal = sweep.sums[sweep.num_chunks + chunk];
      for (uint32_t w = 0; w < warp; ++w) at_below += below_of[w], at_equal += equal_of[w];
#pragma unroll
      for (int k = 0; k < kSlotsOfWarp / kWarp; ++k) {
        const int64_t i = first + k * kWarp + lane;
        int64_t at = -1;
        if (((below[k] >> lane) & 1u) != 0) at = at_below + __popc(below[k] & before);
        const int64_t rank = at_equal + __popc(equal[k] & before);
        if (((equal[k] >> lane) & 1u) != 0 && rank < num_equal) at = num_below + rank;
        if (at >= 0) {
          sweep.keys[0][at] = key_of(view, view.scores[i]);
          sweep.slots[0][at] = static_cast<uint32_t>(i);
        }
        at_below += __popc(below[k]);
        at_equal += __popc(equal[k]);
      }
    } else if (threadIdx.x == 0) {
      uint32_t all_below = 0, all_equal = 0;
      for (int w = 0; w < kWarps; ++w) all_below += below_of[w], all_equal += equal_of[w];
      sweep.sums[chunk] = all_below;
      sweep.sums[sweep.num_chunks + chunk] = all_equal;
    }
    __syncthreads();
  }
}

// A pass of the sort, by one digit from `shift` on and stable: each block counts the digits of its own run of items,
// blocks sum what all counted of a digit, and each takes its items to their places. cub::DeviceRadixSort would sort in
// every call, and as many as there may be, since the host does not know how many there are.
struct Pass {
  const uint64_t* keys;
  const uint32_t* slots;
  uint64_t* to_keys;
  uint32_t* to_slots;
  uint32_t *digits, *totals;
  int64_t begin, end;  // the block's
  int shift;

  __device__ __forceinline__ Pass(const EvictionView& view, const Sweep& sweep, int shift) : shift(shift) {
    const int from = shift / kSortBits % 2;
    keys = sweep.keys[from];
    slots = sweep.slots[from];
    to_keys = sweep.keys[1 - from];
    to_slots = sweep.slots[1 - from];
    digits = sweep.digits;
    totals = sweep.totals;
    const int64_t count = view.plan->wanted;
    const int64_t each = (count + gridDim.x - 1) / gridDim.x;
    begin = min(count, blockIdx.x * each);
    end = min(count, begin + each);
  }
  __device__ __forceinline__ uint32_t digit_of(uint64_t key) const {
    return static_cast<uint32_t>(key >> shift) & (kSortDigits - 1u);
  }
  __device__ __forceinline__ uint32_t& own(uint32_t digit) const { return digits[digit * gridDim.x + blockIdx.x]; }

  __device__ __forceinline__ void count_digits() const {
    __shared__ uint32_t counts[kSortDigits];
    counts[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) atomicAdd(&counts[digit_of(keys[i])], 1u);
    __syncthreads();
    own(threadIdx.x) = counts[threadIdx.x];
    __syncthreads();
  }

  __device__ __forceinline__ void sum_digits() const {
    for (uint32_t digit = blockIdx.x; digit < kSortDigits; digit += gridDim.x) {
      const uint32_t total = add_up(digits + static_cast<int64_t>(digit) * gridDim.x, gridDim.x);
      if (threadIdx.x == 0) totals[digit] = total;
    }
  }

  __device__ __forceinline__ void scatter() const {
    using Scan = cub::BlockScan<uint32_t, kThreads>;
    __shared__ typename Scan::TempStorage storage;
    __shared__ uint32_t of_warps[kWarps][kSortDigits];
    const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    uint32_t next;  // of the digit that is the thread's number
    Scan(storage).ExclusiveSum(totals[threadIdx.x], next);
    next += own(threadIdx.x);
    __syncthreads();
    for (int64_t first = begin; first < end; first += kThreads) {
      for (int w = 0; w < kWarps; ++w) of_warps[w][threadIdx.x] = 0;
      __syncthreads();
      const int64_t i = first + threadIdx.x;
      const uint64_t key = i < end ? keys[i] : 0;
      const uint32_t digit = i < end ? digit_of(key) : kSortDigits;
      const unsigned peers = __match_any_sync(kWholeWarp, digit);
      const uint32_t rank = __popc(peers & ((1u << lane) - 1u));
      if (i < end && rank == 0) of_warps[warp][digit] = __popc(peers);
      __syncthreads();
      for (int w = 0; w < kWarps; ++w) {
        const uint32_t here = of_warps[w][threadIdx.x];
        of_warps[w][threadIdx.x] = next;
        next += here;
      }
      __syncthreads();
      if (i < end) {
        const uint32_t to = of_warps[warp][digit] + rank;
        to_keys[to] = key;
        to_slots[to] = slots[i];
      }
      __syncthreads();
    }
  }
};

// The first ones go, the others are the new queue.
__device__ __forceinline__ void give(const EvictionView& view, const Sweep& sweep) {
  Plan& plan = *view.plan;
  const int sorted = (view.key_bits + kSortBits - 1) / kSortBits % 2;
  const auto found = static_cast<int64_t>(plan.found), missing = plan.need - found;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < plan.wanted;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const Candidate candidate = {score_of(view, sweep.keys[sorted][i]), sweep.slots[sorted][i]};
    if (i < missing) {
      view.give_up(found + i, candidate);
    } else {
      view.candidates[i - missing] = candidate;
    }
    if (i == 0) plan.taken = plan.need;
  }
}

}  // namespace
}  // namespace sok::cuda

#endif  // SOK_CUDA_SWEEP_CUH_
