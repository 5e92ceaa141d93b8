// SPDX-License-Identifier: Apache-2.0
#include "cuda/eviction.h"

#include <algorithm>
#include <bit>
#include <cub/block/block_reduce.cuh>
#include <utility>

#include "cuda/launch.h"
#include "cuda/report.cuh"
#include "cuda/runtime.h"

namespace sok::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    halve_kernel(const __grid_constant__ Uses uses, int64_t* scores, int64_t num_slots) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < num_slots && scores[i] != Eviction::kNoKey) scores[i] = uses.halved(scores[i]);
}

__global__ void __launch_bounds__(kThreads) forget_kernel(const int64_t* slots, int64_t n, int64_t* scores) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const int64_t slot = slots != nullptr ? slots[i] : i;
  if (slot >= 0) scores[slot] = Eviction::kNoKey;
}

// most: the latest use and the highest rank of what is right.
__global__ void __launch_bounds__(kThreads)
    check_scores_kernel(const int64_t* slots, const int64_t* scores, int64_t n, int64_t num_slots,
                        unsigned long long* most, int32_t number, sok_error_record* errors) {
  using Reduce = cub::BlockReduce<int64_t, kThreads>;
  __shared__ typename Reduce::TempStorage storage[2];
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  int64_t used = 0, rank = 0;
  if (i < n) {
    if (slots[i] >= num_slots) {
      report(errors, Fault::kSlot, number, slots[i], num_slots);
    } else if (!Uses::is_score(scores[i])) {
      report(errors, Fault::kScore, number, scores[i], i);
    } else {
      used = Uses::last_use_of(scores[i]);
      rank = Uses::rank_of(scores[i]);
    }
  }
  const auto greater = [](int64_t a, int64_t b) { return a > b ? a : b; };
  used = Reduce(storage[0]).Reduce(used, greater);
  rank = Reduce(storage[1]).Reduce(rank, greater);
  if (threadIdx.x != 0) return;
  atomicMax(&most[0], static_cast<unsigned long long>(used));
  atomicMax(&most[1], static_cast<unsigned long long>(rank));
}

__global__ void __launch_bounds__(kThreads) set_scores_kernel(const int64_t* slots, const int64_t* scores, int64_t n,
                                                              int64_t* to, const sok_error_record* errors) {
  __shared__ bool is_wrong;
  if (threadIdx.x == 0) is_wrong = is_recorded(errors);
  __syncthreads();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (is_wrong || i >= n || slots[i] < 0) return;
  if (to[slots[i]] != Eviction::kNoKey) to[slots[i]] = scores[i];
}

__global__ void __launch_bounds__(kThreads) find_unused_kernel(const int64_t* scores, int64_t first, int64_t n,
                                                               int64_t last, const int64_t* next_slot, uint8_t* marks) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  // The host counts more slots than there are, which have no scores.
  marks[i] = first + i < *next_slot && Uses::last_use_of(scores[first + i]) <= last ? 1 : 0;
}

int bits_of(int64_t value) { return static_cast<int>(std::bit_width(static_cast<uint64_t>(value))); }

}  // namespace

Eviction::Eviction(sok_device device, sok_eviction strategy, int64_t half_life, int64_t capacity, int64_t most_slots,
                   std::unique_ptr<ReservedRange> scores)
    : sok::Eviction(strategy, half_life, capacity, std::move(scores)), capacity_(capacity), most_slots_(most_slots) {
  SOK_CHECK(strategy == SOK_EVICT_NOTHING || most_slots <= kMaxEvictingRows, "config.index.capacity is ", capacity,
            ", must be below 2^32 on a GPU where rows are evicted, and below 2^31 with admission too");
  candidates_ = reserve_range(
      {sizeof(sok_reserved_range_config), device, share_ * int64_t{sizeof(Candidate)}, "candidates for eviction", 0});
  try {
    queue_ = static_cast<Queue*>(allocate(sizeof(Queue)));
    SOK_CUDA_CHECK(cudaMemset(queue_, 0, sizeof(Queue)));
    SOK_CUDA_CHECK(cudaDeviceSynchronize());  // whichever stream uses it first
  } catch (...) {
    release(queue_);
    throw;
  }
}

Eviction::~Eviction() { release(queue_); }

EvictionView Eviction::view(int64_t num_keys, bool may_be_full) {
  max_rank_ = std::max(max_rank_, Uses::rank_of(uses_.again(Uses::score_of(max_rank_, 0))));
  if (may_be_full) {
    freed_ = uses_.generation;
    candidates_->grow(share_ * int64_t{sizeof(Candidate)});
  }
  EvictionView view = {};
  view.uses = uses_;
  view.step = step_;
  view.scores = scores();
  view.capacity = capacity_;
  view.most_slots = most_slots_;
  view.share = share_;
  view.candidates = reinterpret_cast<Candidate*>(candidates_->data());
  view.queue = queue_;
  view.used_bits = bits_of(uses_.generation);
  view.key_bits = 1 + bits_of(max_rank_) + view.used_bits;
  view.num_keys = num_keys;
  return view;
}

void Eviction::halve_counts(const sok_context& context, int64_t num_slots) {
  const Scope scope(context);
  SOK_LAUNCH(halve_kernel, ceil_div(num_slots, kThreads), scope.stream(), uses_, scores(), num_slots);
}

void Eviction::forget(const sok_context& context, const int64_t* slots, int64_t n) {
  const Scope scope(context);
  SOK_LAUNCH(forget_kernel, ceil_div(n, kThreads), scope.stream(), slots, n, scores());
}

void Eviction::forget_all(const sok_context& context, int64_t num_slots) {
  const Scope scope(context);
  SOK_LAUNCH(forget_kernel, ceil_div(num_slots, kThreads), scope.stream(), nullptr, num_slots, scores());
  forget_queue(context);
}

void Eviction::forget_queue(const sok_context& context) {
  const Scope scope(context);
  SOK_CUDA_CHECK(cudaMemsetAsync(queue_, 0, sizeof(Queue), scope.stream()));
}

bool Eviction::find_unused(const sok_context& context, int64_t first, int64_t n, int64_t last, const int64_t* next_slot,
                           uint8_t* marks) const {
  const Scope scope(context);
  SOK_LAUNCH(find_unused_kernel, ceil_div(n, kThreads), scope.stream(), scores(), first, n, last, next_slot, marks);
  return true;
}

int64_t Eviction::set(const sok_context& context, const char* table, int64_t num_slots, const int64_t* slots,
                      const int64_t* scores, int64_t n) {
  const Scope scope(context);
  SOK_CHECK_STATUS(SOK_FAILED_PRECONDITION, !is_capturing(scope.stream()), "table '", table,
                   "': scores cannot be set while the stream is being captured in a CUDA graph");
  const Report report(scope);
  TableId id;
  id.name = table;
  if (has_error_record(scope.context())) id.number = scope.context().errors->keeper->names.number_of(table);
  const Buffer<unsigned long long> most(scope.context(), 2);
  SOK_CUDA_CHECK(cudaMemsetAsync(most.data(), 0, 2 * sizeof(unsigned long long), scope.stream()));
  SOK_LAUNCH(check_scores_kernel, ceil_div(n, kThreads), scope.stream(), slots, scores, n, num_slots, most.data(),
             id.number, report.errors());
  SOK_LAUNCH(set_scores_kernel, ceil_div(n, kThreads), scope.stream(), slots, scores, n, this->scores(),
             report.errors());
  unsigned long long found[2];
  SOK_CUDA_CHECK(cudaMemcpyAsync(found, most.data(), sizeof(found), cudaMemcpyDeviceToHost, scope.stream()));
  SOK_CUDA_CHECK(cudaStreamSynchronize(scope.stream()));
  report.finish(id);
  max_rank_ = std::max(max_rank_, static_cast<int64_t>(found[1]));
  go_on_from_rank(static_cast<int64_t>(found[1]));
  return static_cast<int64_t>(found[0]);
}

std::unique_ptr<sok::Eviction> make_eviction(sok_device device, sok_eviction strategy, int64_t half_life,
                                             int64_t capacity, int64_t most_slots,
                                             std::unique_ptr<ReservedRange> scores) {
  return std::make_unique<Eviction>(device, strategy, half_life, capacity, most_slots, std::move(scores));
}

}  // namespace sok::cuda
