// SPDX-License-Identifier: Apache-2.0
// Guests of a hash index (HashRequest::allowed), whose slots become free again.
#ifndef SOK_CUDA_GUESTS_CUH_
#define SOK_CUDA_GUESTS_CUH_

#include "cuda/hash_kernels.cuh"

namespace sok::cuda {
namespace {

// Where there are more than `most`, which the device alone knows: the slot of the first is the first to be given out.
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

}  // namespace
}  // namespace sok::cuda

#endif  // SOK_CUDA_GUESTS_CUH_
