// SPDX-License-Identifier: Apache-2.0
// Generations of slots: set_generations; lower_generations; check_generations, whether the slots of a gradient still
// have the keys that they were located for.
#include "cuda/launch.h"
#include "cuda/report.cuh"
#include "cuda/runtime.h"
#include "cuda/stages.h"
#include "cuda/vector.cuh"
#include "table/dynamic_table.h"

namespace sok::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    set_kernel(const int64_t* slots, int64_t n, const __grid_constant__ Generations to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const int64_t slot = slots != nullptr ? slots[i] : i;
  if (slot >= 0) to.since[slot] = to.generation;
}

__global__ void __launch_bounds__(kThreads) lower_kernel(int64_t by, int64_t n, int32_t* since, int64_t* scores) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  if (since[i] != DynamicTable::kNoKey) since[i] = since[i] < by ? 0 : static_cast<int32_t>(since[i] - by);
  if (scores != nullptr && scores[i] != sok::Eviction::kNoKey) scores[i] = Uses::lowered(scores[i], by);
}

__global__ void __launch_bounds__(kThreads)
    check_kernel(const void* slots, bool is_64bit, int64_t size, const int32_t* since, int64_t num_slots,
                 int64_t generation, int32_t table, sok_error_record* errors) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= size) return;
  const int64_t slot = load_integer(slots, is_64bit, i);
  if (has_lost_key(since, num_slots, slot, generation)) report(errors, Fault::kLostKey, table, slot, generation);
}

}  // namespace

void set_generations(const sok_context& context, const int64_t* slots, int64_t n, const Generations& to) {
  const Scope scope(context);
  SOK_LAUNCH(set_kernel, ceil_div(n, kThreads), scope.stream(), slots, n, to);
}

void lower_generations(const sok_context& context, const char* table, int64_t by, int64_t n, int32_t* since,
                       int64_t* scores) {
  const Scope scope(context);
  SOK_CHECK_STATUS(SOK_FAILED_PRECONDITION, !is_capturing(scope.stream()), "table '", table,
                   "': its generations cannot be numbered anew while the stream is being captured in a CUDA graph");
  SOK_LAUNCH(lower_kernel, ceil_div(n, kThreads), scope.stream(), by, n, since, scores);
}

void check_generations(const sok_context& context, const Columns& table, const std::vector<Gradient>& gradients) {
  const Scope scope(context);
  const Report report(scope);
  for (const Gradient& summand : gradients) {
    SOK_LAUNCH(check_kernel, ceil_div(summand.slots.size, kThreads), scope.stream(), summand.slots.data,
               summand.slots.is_64bit, summand.slots.size, table.since, table.num_slots, summand.generation,
               table.number, report.errors());
  }
  report.finish(table);
}

}  // namespace sok::cuda
