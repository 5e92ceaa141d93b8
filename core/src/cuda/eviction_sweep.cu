// SPDX-License-Identifier: Apache-2.0
// The sweep of eviction: the rows that go first among all, by counting the digits of what ranks them, from the highest.
// Every kernel passes over its work where the device needs no sweep.
#include <algorithm>

#include "cuda/add_up.cuh"
#include "cuda/eviction.h"
#include "cuda/report.cuh"
#include "cuda/sort.h"

namespace sok::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;
constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kSlotsOfWarp = 16 * kWarp;  // of a chunk
constexpr int64_t kSlotChunk = kSlotsOfWarp * kWarps;
constexpr int64_t kBlocks = 132 * 8;     // that read all scores
constexpr int64_t kAtOnce = 4;           // scores on their way to a thread
constexpr uint64_t kNoRow = UINT64_MAX;  // the key of a slot whose row may not go

// One index in a call. Rows go in the order of keys: first those that the running step does not use, of either by rank
// and last use. A key has the bits of a score that are in use, which are few where ranks and generations are low.
struct Sweep {
  EvictionView view;
  unsigned long long* counts;  // [kDigits], zeros
  int64_t num_chunks;
  uint32_t* sums;  // [2, num_chunks], of keys below the threshold, and equal to it
  uint64_t* keys;  // of rows that go or are candidates, kNoRow behind them
  uint32_t* slots;
  int32_t* is_shut;
  int32_t number;
  sok_error_record* errors;

  __device__ __forceinline__ bool is_needed() const { return *is_shut == 0 && view.is_swept(); }
  __device__ __forceinline__ uint64_t key_of(int64_t score) const {
    const int64_t used = Uses::last_use_of(score);
    if (used >= view.uses.generation) return kNoRow;  // no key, or one of the running call
    const uint64_t key = static_cast<uint64_t>(Uses::rank_of(score) << view.used_bits | used);
    return key | (used > view.step ? uint64_t{1} << (view.key_bits - 1) : 0);
  }
  __device__ __forceinline__ int64_t score_of(uint64_t key) const {
    const auto score = static_cast<int64_t>(key & ((uint64_t{1} << (view.key_bits - 1)) - 1));
    return Uses::score_of(score >> view.used_bits, score & ((int64_t{1} << view.used_bits) - 1));
  }
};

// How many keys have each value of a digit, `width` bits from `shift` on, among those whose upper digits are the
// threshold's.
__global__ void __launch_bounds__(kThreads) digit_kernel(const __grid_constant__ Sweep p, int shift, int width) {
  __shared__ uint32_t counts[kDigits];
  if (!p.is_needed()) return;
  for (int digit = threadIdx.x; digit < kDigits; digit += kThreads) counts[digit] = 0;
  __syncthreads();
  const uint64_t upper = p.view.plan->threshold;
  const int64_t num_slots = p.view.plan->num_slots;
  // Neighbours are often alike: a thread counts a run of equal digits at once.
  uint32_t last = 0, run = 0;
  for (int64_t first = blockIdx.x * kAtOnce * kThreads; first < num_slots; first += gridDim.x * kAtOnce * kThreads) {
    int64_t scores[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t i = first + k * kThreads + threadIdx.x;
      scores[k] = i < num_slots ? p.view.scores[i] : Eviction::kNoKey;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const uint64_t key = p.key_of(scores[k]);
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
    if (counts[digit] > 0) atomicAdd(&p.counts[digit], static_cast<unsigned long long>(counts[digit]));
  }
}

// By one block: the digit of the threshold. Of the first digit the uppermost bit tells how many rows the running step
// does not use, and so how many are wanted: as many as are missing in whole shares, or all there are.
__global__ void __launch_bounds__(kThreads) pick_kernel(const __grid_constant__ Sweep p, int shift, int width) {
  constexpr int kItems = kDigits / kThreads;
  using Scan = cub::BlockScan<int64_t, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  __shared__ int64_t unused;
  if (!p.is_needed()) return;
  Plan& plan = *p.view.plan;
  int64_t counts[kItems], before[kItems], all;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    unsigned long long& count = p.counts[threadIdx.x * kItems + k];
    counts[k] = static_cast<int64_t>(count);
    count = 0;
  }
  Scan(storage).ExclusiveSum(counts, before, all);
  if (shift + width == p.view.key_bits) {
    const int of_step = 1 << (width - 1);
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (static_cast<int>(threadIdx.x) * kItems + k == of_step) unused = before[k];
    }
    __syncthreads();
    const int64_t missing = plan.need - static_cast<int64_t>(plan.found), share = p.view.share;
    const auto shares = [&](int64_t rows, int64_t of) { return min(of, (rows + share - 1) / share * share); };
    if (threadIdx.x == 0) {
      if (missing > all) {
        report(p.errors, Fault::kManyKeys, p.number, p.view.capacity, p.view.capacity);
        *p.is_shut = 2;
      }
      plan.wanted = missing <= unused ? shares(missing, unused) : unused + shares(missing - unused, all - unused);
      plan.left = plan.wanted;
      plan.below = 0;
      plan.threshold = 0;
    }
    __syncthreads();
    if (missing > all) return;
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
}

// Counts the rows of each chunk that go or are candidates, or writes them, in the order of slots.
template <bool kWrites>
__global__ void __launch_bounds__(kThreads) select_kernel(const __grid_constant__ Sweep p) {
  __shared__ uint32_t below_of[kWarps], equal_of[kWarps];
  if (!p.is_needed()) return;
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const unsigned before = (1u << lane) - 1u;
  const uint64_t threshold = p.view.plan->threshold;
  const int64_t num_below = p.view.plan->below, num_equal = p.view.plan->left, num_slots = p.view.plan->num_slots;
  for (int64_t chunk = blockIdx.x; chunk < p.num_chunks; chunk += gridDim.x) {
    const int64_t first = chunk * kSlotChunk + warp * kSlotsOfWarp;
    unsigned below[kSlotsOfWarp / kWarp], equal[kSlotsOfWarp / kWarp];
    uint32_t sum_below = 0, sum_equal = 0;
#pragma unroll
    for (int k = 0; k < kSlotsOfWarp / kWarp; ++k) {
      const int64_t i = first + k * kWarp + lane;
      const uint64_t key = i < num_slots ? p.key_of(p.view.scores[i]) : kNoRow;
      below[k] = __ballot_sync(0xffffffffu, key < threshold);
      equal[k] = __ballot_sync(0xffffffffu, key == threshold);
      sum_below += __popc(below[k]);
      sum_equal += __popc(equal[k]);
    }
    if (lane == 0) below_of[warp] = sum_below, equal_of[warp] = sum_equal;
    __syncthreads();
    if (kWrites) {
      int64_t at_below = p.sums[chunk], at_equal = p.sums[p.num_chunks + chunk];
      for (uint32_t w = 0; w < warp; ++w) at_below += below_of[w], at_equal += equal_of[w];
#pragma unroll
      for (int k = 0; k < kSlotsOfWarp / kWarp; ++k) {
        const int64_t i = first + k * kWarp + lane;
        int64_t at = -1;
        if (((below[k] >> lane) & 1u) != 0) at = at_below + __popc(below[k] & before);
        const int64_t rank = at_equal + __popc(equal[k] & before);
        if (((equal[k] >> lane) & 1u) != 0 && rank < num_equal) at = num_below + rank;
        if (at >= 0) {
          p.keys[at] = p.key_of(p.view.scores[i]);
          p.slots[at] = static_cast<uint32_t>(i);
        }
        at_below += __popc(below[k]);
        at_equal += __popc(equal[k]);
      }
    } else if (threadIdx.x == 0) {
      uint32_t all_below = 0, all_equal = 0;
      for (int w = 0; w < kWarps; ++w) all_below += below_of[w], all_equal += equal_of[w];
      p.sums[chunk] = all_below;
      p.sums[p.num_chunks + chunk] = all_equal;
    }
    __syncthreads();
  }
}

// By two blocks.
__global__ void __launch_bounds__(kThreads) add_up_selected_kernel(const __grid_constant__ Sweep p) {
  if (p.is_needed()) add_up(p.sums + blockIdx.x * p.num_chunks, p.num_chunks);
}

// The first ones go, the others are the new queue.
__global__ void __launch_bounds__(kThreads) give_kernel(const __grid_constant__ Sweep p) {
  if (!p.is_needed()) return;
  Plan& plan = *p.view.plan;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= plan.wanted) return;
  const auto found = static_cast<int64_t>(plan.found), missing = plan.need - found;
  const Candidate candidate = {p.score_of(p.keys[i]), p.slots[i]};
  if (i < missing) {
    p.view.give_up(found + i, candidate);
  } else {
    p.view.candidates[i - missing] = candidate;
  }
  if (i == 0) plan.taken = plan.need;
}

}  // namespace

void sweep(const Scope& scope, const EvictionView& view, int32_t* is_shut, int32_t number, sok_error_record* errors) {
  const sok_context& context = scope.context();
  const int64_t most = std::min(view.capacity, view.num_keys + view.share);
  const int64_t num_chunks = ceil_div(view.capacity, kSlotChunk);
  const Buffer<unsigned long long> counts(context, kDigits);
  const Buffer<uint32_t> sums(context, 2 * num_chunks);
  const Buffer<uint64_t> keys(context, most), sorted_keys(context, most);
  const Buffer<uint32_t> slots(context, most), sorted_slots(context, most);
  SOK_CUDA_CHECK(cudaMemsetAsync(counts.data(), 0, kDigits * sizeof(unsigned long long), scope.stream()));
  SOK_CUDA_CHECK(cudaMemsetAsync(keys.data(), 0xff, static_cast<size_t>(most) * sizeof(uint64_t), scope.stream()));
  Sweep p = {};
  p.view = view;
  p.counts = counts.data();
  p.num_chunks = num_chunks;
  p.sums = sums.data();
  p.keys = keys.data();
  p.slots = slots.data();
  p.is_shut = is_shut;
  p.number = number;
  p.errors = errors;
  const int64_t blocks = std::min(kBlocks, num_chunks);
  for (int shift = view.key_bits; shift > 0;) {
    const int width = std::min(kDigitBits, shift);
    shift -= width;
    SOK_LAUNCH(digit_kernel, blocks, scope.stream(), p, shift, width);
    SOK_LAUNCH(pick_kernel, 1, scope.stream(), p, shift, width);
  }
  SOK_LAUNCH(select_kernel<false>, blocks, scope.stream(), p);
  SOK_LAUNCH(add_up_selected_kernel, 2, scope.stream(), p);
  SOK_LAUNCH(select_kernel<true>, blocks, scope.stream(), p);
  Pairs<uint64_t> pairs = {{keys.data(), sorted_keys.data()}, {slots.data(), sorted_slots.data()}};
  sort_pairs(scope, pairs, most, view.key_bits);
  p.keys = pairs.keys[1];
  p.slots = pairs.values[1];
  SOK_LAUNCH(give_kernel, ceil_div(most, kThreads), scope.stream(), p);
}

}  // namespace sok::cuda
