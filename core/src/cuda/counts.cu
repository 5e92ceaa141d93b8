// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch.h"
#include "cuda/report.cuh"
#include "cuda/runtime.h"

namespace sok::cuda {
namespace {

__global__ void write_counts_kernel(const int64_t* counts, int64_t stride, const sok_error_record* errors,
                                    int64_t num_cells, int64_t num_columns, int64_t* message) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_cells) return;
  const bool failed = (i + 1) % num_columns == 0 && errors != nullptr && is_recorded(errors);
  message[i] = failed ? 1 : counts[i / num_columns * stride + i % num_columns];
}

__global__ void write_flags_kernel(const sok_error_record* errors, bool failed, int64_t n, int64_t* flags) {
  for (int64_t i = threadIdx.x; i < n; i += kThreads) flags[i] = failed || is_recorded(errors) ? 1 : 0;
}

// Where this rank has a reason of its own it keeps it: those that survive an exchange that was ended tell each other
// that they have failed.
__global__ void read_flags_kernel(const int64_t* flags, int64_t n, int64_t rank, sok_error_record* errors) {
  const bool has_own = is_recorded(errors);
  __syncthreads();  // no thread takes what another reports here for its own
  if (has_own) return;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    if (i != rank && flags[i] != 0) report(errors, Fault::kPeer, -1, i, n);
  }
}

}  // namespace

void write_flags(const sok_error_record* errors, bool failed, int64_t n, int64_t* flags, void* stream) {
  SOK_LAUNCH(write_flags_kernel, 1, static_cast<cudaStream_t>(stream), errors, failed, n, flags);
}

void read_flags(const int64_t* flags, int64_t n, int64_t rank, sok_error_record* errors, void* stream) {
  SOK_LAUNCH(read_flags_kernel, 1, static_cast<cudaStream_t>(stream), flags, n, rank, errors);
}

void write_counts(const int64_t* counts, int64_t stride, const sok_error_record* errors, int64_t num_cells,
                  int64_t num_columns, int64_t* message, void* stream) {
  SOK_LAUNCH(write_counts_kernel, ceil_div(num_cells, kThreads), static_cast<cudaStream_t>(stream), counts, stride,
             errors, num_cells, num_columns, message);
}

}  // namespace sok::cuda
