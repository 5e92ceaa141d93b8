// SPDX-License-Identifier: Apache-2.0
// Kernels of a hash index beside its calls: entries move where it grows, guests go, keys are listed.
#ifndef SOK_CUDA_HASH_UPKEEP_CUH_
#define SOK_CUDA_HASH_UPKEEP_CUH_

#include "cuda/hash_kernels.cuh"

namespace sok::cuda {
namespace {

// Where there are more guests (HashRequest::allowed) than `most`, which the device alone knows: the slot of the first
// is the first to be given out.
__global__ void __launch_bounds__(kThreads)
    release_kernel(const State* state, int64_t most, const int64_t* guests, int64_t* free_slots, int32_t* since) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t count = state->num_guests;
  if (count <= most || i >= count) return;
  free_slots[state->num_free + count - 1 - i] = guests[i];
  since[guests[i]] = INT32_MAX;
}

// The new state, when all slots are free.
__global__ void __launch_bounds__(kThreads) finish_release_kernel(State* state, int64_t most) {
  if (threadIdx.x != 0 || state->num_guests <= most) return;
  state->num_free += state->num_guests;
  state->num_guests = 0;
}

// Entries of segments that were taken away, to where they belong now.
__global__ void __launch_bounds__(kThreads)
    move_kernel(const HashEntry* entries, int64_t num_entries, const __grid_constant__ HashSpace space, int32_t number,
                sok_error_record* errors) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  HashEntry entry = {0, 0};
  if (i < num_entries) entry = load_entry(&entries[i]);
  const bool is_used = HashEntry::is_used(entry.word);
  const int64_t slot = HashEntry::slot_of(entry.word);
  const bool waits = is_used && !place_in_first(space, entry.key, slot);
  const bool is_placed = place_keys(space, entry.key, slot, waits);
  if (waits && !is_placed) report(errors, Fault::kCollision, number, 0, kSegmentEntries);
}

struct IsAt {
  const int64_t* slots;
  int64_t first_slot, n;
  __device__ uint32_t operator()(uint32_t i) const { return i < n && slots[i] == first_slot + i ? 1u : 0u; }
};

__global__ void __launch_bounds__(kThreads)
    export_kernel(const __grid_constant__ IsAt is_at, const uint32_t* ranks, const int64_t* all_keys,
                  const int64_t* num_before, int64_t* keys, int64_t* slots) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= is_at.n || is_at(static_cast<uint32_t>(i)) == 0) return;
  keys[*num_before + ranks[i]] = all_keys[i];
  slots[*num_before + ranks[i]] = is_at.first_slot + i;
}

__global__ void __launch_bounds__(kThreads) add_exported_kernel(const uint32_t* more, int64_t* count) {
  if (threadIdx.x == 0) *count += *more;
}

}  // namespace
}  // namespace sok::cuda

#endif  // SOK_CUDA_HASH_UPKEEP_CUH_
