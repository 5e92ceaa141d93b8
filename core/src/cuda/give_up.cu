// SPDX-License-Identifier: Apache-2.0
// The rows that the tables of a call give up, by one cooperative launch: how many, the device alone knows, and where
// there are none the launch ends at once. Valid candidates of the queues go first. Where these are too few a sweep
// finds the lowest scores among all, by counting digits from the highest, and sorts them into a new queue.
#include <cooperative_groups.h>

#include <algorithm>
#include <cub/block/block_scan.cuh>
#include <vector>

#include "cuda/layout.h"
#include "cuda/runtime.h"
#include "cuda/sweep.cuh"
#include "cuda/upload.h"

namespace sok::cuda {
namespace {

constexpr int kBlocksOfMultiprocessor = 4;

constexpr int64_t kQueueChunk = 1024;  // candidates that a block looks at together
constexpr int kItemsOfThread = kQueueChunk / kThreads;

struct Call {
  const EvictionView* views;
  const Sweep* sweeps;
  uint32_t num_tables;
  int32_t most_key_bits;
  int32_t* is_shut;
  sok_error_record* errors;
};

__device__ __forceinline__ bool gives_up(const EvictionView& view) {
  return view.plan != nullptr && view.plan->need > 0;
}

// Until a sweep has found that there are not enough rows.
__device__ __forceinline__ bool is_swept(const EvictionView& view) {
  return gives_up(view) && view.is_swept() && view.plan->wanted >= 0;
}

__device__ __forceinline__ bool is_valid(const EvictionView& view, int64_t i) {
  const Candidate candidate = view.candidates[i];
  return view.scores[candidate.slot] == candidate.score;
}
__device__ __forceinline__ int64_t num_candidates(const EvictionView& view) {
  return view.queue->end - view.queue->head;
}
// Chunks that were looked at, all of them complete.
__device__ __forceinline__ int64_t num_chunks_seen(const EvictionView& view) {
  return min(int64_t{view.plan->tickets}, (num_candidates(view) + kQueueChunk - 1) / kQueueChunk);
}

// Blocks take chunks of the queue in their order until enough valid candidates are found.
__device__ __forceinline__ void look(const EvictionView& view, const Sweep& sweep) {
  __shared__ uint32_t ticket;
  Plan& plan = *view.plan;
  const int64_t head = view.queue->head, count = num_candidates(view);
  const auto need = static_cast<unsigned long long>(plan.need);
  for (;;) {
    if (threadIdx.x == 0) {
      const bool is_enough = *static_cast<volatile unsigned long long*>(&plan.found) >= need;
      ticket = is_enough ? UINT32_MAX : atomicAdd(&plan.tickets, 1u);
    }
    __syncthreads();
    const uint32_t mine = ticket;
    const int64_t first = mine * kQueueChunk;
    __syncthreads();
    if (mine == UINT32_MAX || first >= count) return;
    int found = 0;
    for (int k = 0; k < kItemsOfThread; ++k) {
      const int64_t i = first + k * kThreads + threadIdx.x;
      found += __syncthreads_count(i < count && is_valid(view, head + i));
    }
    if (threadIdx.x == 0) {
      sweep.queue_sums[mine] = static_cast<uint32_t>(found);
      atomicAdd(&plan.found, static_cast<unsigned long long>(found));
    }
  }
}

__device__ __forceinline__ void take(const EvictionView& view, const Sweep& sweep) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  Plan& plan = *view.plan;
  const int64_t head = view.queue->head, count = num_candidates(view), chunks = num_chunks_seen(view);
  if (blockIdx.x == 0 && threadIdx.x == 0) plan.taken = min(static_cast<int64_t>(plan.found), plan.need);
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    int64_t rank = sweep.queue_sums[chunk];
    if (rank >= plan.need) return;
    const int64_t first = chunk * kQueueChunk + threadIdx.x * kItemsOfThread;
    bool are_valid[kItemsOfThread];
    int found = 0, before = 0;
#pragma unroll
    for (int k = 0; k < kItemsOfThread; ++k) {
      are_valid[k] = first + k < count && is_valid(view, head + first + k);
      found += are_valid[k];
    }
    Scan(storage).ExclusiveSum(found, before);
    rank += before;
#pragma unroll
    for (int k = 0; k < kItemsOfThread; ++k) {
      if (!are_valid[k]) continue;
      if (rank < plan.need) view.give_up(rank, view.candidates[head + first + k]);
      if (++rank == plan.need) plan.head = head + first + k + 1;
    }
    __syncthreads();
  }
}

// Calls of `work` for the tables of which `is_meant`, by all blocks.
template <typename IsMeant, typename Work>
__device__ __forceinline__ void for_all(const Call& p, const IsMeant& is_meant, const Work& work) {
  for (uint32_t t = 0; t < p.num_tables; ++t) {
    if (is_meant(p.views[t])) work(p.views[t], p.sweeps[t], block_for(t, p.num_tables));
  }
}
// By a block for each.
template <typename IsMeant, typename Work>
__device__ __forceinline__ void for_own(const Call& p, const IsMeant& is_meant, const Work& work) {
  for (uint32_t t = blockIdx.x; t < p.num_tables; t += gridDim.x) {
    if (is_meant(p.views[t])) work(p.views[t], p.sweeps[t]);
  }
}
template <typename IsMeant>
__device__ __forceinline__ bool any(const Call& p, const IsMeant& is_meant) {
  for (uint32_t t = 0; t < p.num_tables; ++t) {
    if (is_meant(p.views[t])) return true;
  }
  return false;
}

// Blocks differ in nothing that decides whether they come to a barrier: it is read when no block changes it.
__global__ void __launch_bounds__(kThreads, kBlocksOfMultiprocessor) give_up_kernel(const __grid_constant__ Call p) {
  const auto need = [](const EvictionView& view) { return gives_up(view); };
  const auto sweep_it = [](const EvictionView& view) { return is_swept(view); };
  if (!any(p, need)) return;
  const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  for_own(p, need, [](const EvictionView&, const Sweep& sweep) {
    for (int digit = threadIdx.x; digit < kDigits; digit += kThreads) sweep.counts[digit] = 0;
  });
  for_all(p, need, [](const EvictionView& view, const Sweep& sweep, uint32_t) { look(view, sweep); });
  grid.sync();
  for_own(p, need,
          [](const EvictionView& view, const Sweep& sweep) { add_up(sweep.queue_sums, num_chunks_seen(view)); });
  grid.sync();
  for_all(p, need, [](const EvictionView& view, const Sweep& sweep, uint32_t) { take(view, sweep); });
  if (*p.is_shut != 0 || !any(p, sweep_it)) return;
  grid.sync();

  for (int done = 0; done < p.most_key_bits; done += kDigitBits) {
    const auto has_digit = [&](const EvictionView& view) { return is_swept(view) && done < view.key_bits; };
    const auto width_of = [&](const EvictionView& view) { return min(kDigitBits, view.key_bits - done); };
    for_all(p, has_digit, [&](const EvictionView& view, const Sweep& sweep, uint32_t block) {
      count_digits(view, sweep, view.key_bits - done - width_of(view), width_of(view), block);
    });
    grid.sync();
    for_own(p, has_digit, [&](const EvictionView& view, const Sweep& sweep) {
      pick(view, sweep, view.key_bits - done - width_of(view), width_of(view), p.is_shut, p.errors);
    });
    grid.sync();
  }
  for_all(p, sweep_it,
          [](const EvictionView& view, const Sweep& sweep, uint32_t block) { select<false>(view, sweep, block); });
  grid.sync();
  for_own(p, sweep_it, [](const EvictionView&, const Sweep& sweep) {
    add_up(sweep.sums, sweep.num_chunks);
    add_up(sweep.sums + sweep.num_chunks, sweep.num_chunks);
  });
  grid.sync();
  for_all(p, sweep_it,
          [](const EvictionView& view, const Sweep& sweep, uint32_t block) { select<true>(view, sweep, block); });
  grid.sync();
  for (int shift = 0; shift < p.most_key_bits; shift += kSortBits) {
    const auto has_pass = [&](const EvictionView& view) { return is_swept(view) && shift < view.key_bits; };
    for_all(p, has_pass,
            [&](const EvictionView& view, const Sweep& sweep, uint32_t) { Pass(view, sweep, shift).count_digits(); });
    grid.sync();
    for_all(p, has_pass,
            [&](const EvictionView& view, const Sweep& sweep, uint32_t) { Pass(view, sweep, shift).sum_digits(); });
    grid.sync();
    for_all(p, has_pass,
            [&](const EvictionView& view, const Sweep& sweep, uint32_t) { Pass(view, sweep, shift).scatter(); });
    grid.sync();
  }
  for_all(p, sweep_it, [](const EvictionView& view, const Sweep& sweep, uint32_t) { give(view, sweep); });
}

// Gives the arrays of a sweep their places in `memory`, and returns how many bytes they take.
int64_t lay_out(Sweep& sweep, const EvictionView& view, int64_t blocks, char* memory) {
  Layout layout(memory);
  const int64_t most = std::min(view.capacity, view.num_keys + view.share);
  sweep.num_chunks = ceil_div(view.most_slots, kSlotChunk);
  layout.place(sweep.counts, kDigits);
  layout.place(sweep.queue_sums, ceil_div(view.share, kQueueChunk));
  layout.place(sweep.sums, 2 * sweep.num_chunks);
  layout.place(sweep.digits, kSortDigits * blocks);
  layout.place(sweep.totals, kSortDigits);
  for (int i = 0; i < 2; ++i) {
    layout.place(sweep.keys[i], most);
    layout.place(sweep.slots[i], most);
  }
  return layout.bytes();
}

}  // namespace

void give_up_rows(const Scope& scope, const std::vector<EvictionView>& views, const EvictionView* on_device,
                  const std::vector<int32_t>& numbers, int32_t* is_shut, sok_error_record* errors) {
  const int blocks = kBlocksOfMultiprocessor * num_multiprocessors();
  int32_t most_key_bits = 0;
  std::vector<Sweep> sweeps(views.size());
  std::vector<Buffer<char>> memory;
  for (size_t t = 0; t < views.size(); ++t) {
    if (views[t].plan == nullptr) continue;
    sweeps[t].number = numbers[t];
    memory.emplace_back(scope.context(), lay_out(sweeps[t], views[t], blocks, nullptr));
    lay_out(sweeps[t], views[t], blocks, memory.back().data());
    most_key_bits = std::max(most_key_bits, views[t].key_bits);
  }
  Upload upload;
  const size_t place = upload.add(sweeps);
  upload.send(scope);
  Call call = {on_device, upload.at<Sweep>(place), static_cast<uint32_t>(views.size()), most_key_bits, is_shut, errors};
  void* arguments[] = {&call};
  SOK_CUDA_CHECK(
      cudaLaunchCooperativeKernel(give_up_kernel, dim3(grid_of(blocks)), dim3(kThreads), arguments, 0, scope.stream()));
}

}  // namespace sok::cuda
