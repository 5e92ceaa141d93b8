// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch.h"
#include "cuda/report.cuh"
#include "cuda/runtime.h"

namespace sok::cuda {
namespace {

// `plan` lies in host memory.
__global__ void write_counts_kernel(const int64_t* plan, CountParts parts, const sok_error_record* errors,
                                    int64_t num_cells, int64_t num_columns, int64_t* message) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_cells) return;
  const bool failed = (i + 1) % num_columns == 0 && errors != nullptr && is_recorded(errors);
  message[i] = failed ? 1 : count_at(plan[i], parts);
}

}  // namespace

void write_counts(const int64_t* plan, const CountParts& parts, const sok_error_record* errors, int64_t num_cells,
                  int64_t num_columns, int64_t* message, void* stream) {
  SOK_LAUNCH(write_counts_kernel, ceil_div(num_cells, kThreads), static_cast<cudaStream_t>(stream), plan, parts, errors,
             num_cells, num_columns, message);
}

}  // namespace sok::cuda
