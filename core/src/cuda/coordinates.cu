// SPDX-License-Identifier: Apache-2.0
// bags_from_coordinates: coordinates of sparse tensors -> row splits.
#include "cuda/launch.h"
#include "cuda/report.cuh"
#include "cuda/sort.h"
#include "cuda/stages.h"

namespace sok::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) begin_kernel(int32_t* sorted) {
  if (threadIdx.x == 0) *sorted = 1;
}

__global__ void __launch_bounds__(kThreads)
    rows_kernel(const int64_t* rows, int64_t size, int64_t stride, int64_t num_bags, uint32_t* bags, uint32_t* numbers,
                int32_t* sorted, sok_error_record* errors) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= size) return;
  const int64_t row = rows[i * stride];
  const bool inside = static_cast<uint64_t>(row) < static_cast<uint64_t>(num_bags);
  if (!inside) report(errors, Fault::kBag, -1, row, num_bags);
  if (i > 0 && rows[(i - 1) * stride] > row) *sorted = 0;
  bags[i] = inside ? static_cast<uint32_t>(row) : 0u;
  numbers[i] = static_cast<uint32_t>(i);
}

__global__ void __launch_bounds__(kThreads) order_kernel(const uint32_t* numbers, int64_t size, int64_t* order) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < size) order[i] = numbers[i];
}

__global__ void __launch_bounds__(kThreads)
    splits_kernel(const uint32_t* bags, int64_t size, int64_t num_bags, int64_t* row_splits) {
  const int64_t bag = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (bag > num_bags) return;
  int64_t low = 0, high = size;  // the first entry whose bag is `bag` or later
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (bags[middle] < bag) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  row_splits[bag] = low;
}

}  // namespace

void bags_from_coordinates(const sok_context& context, const int64_t* rows, int64_t num_rows, int64_t stride,
                           int64_t num_bags, int64_t* row_splits, int64_t* order, int32_t* sorted) {
  const Scope scope(context);
  const Report report(scope);
  const Buffer<uint32_t> bags(scope.context(), num_rows), other_bags(scope.context(), num_rows);
  const Buffer<uint32_t> numbers(scope.context(), num_rows), other_numbers(scope.context(), num_rows);
  SOK_LAUNCH(begin_kernel, 1, scope.stream(), sorted);
  SOK_LAUNCH(rows_kernel, ceil_div(num_rows, kThreads), scope.stream(), rows, num_rows, stride, num_bags, bags.data(),
             numbers.data(), sorted, report.errors());
  Pairs<uint32_t> pairs = {{bags.data(), other_bags.data()}, {numbers.data(), other_numbers.data()}};
  sort_pairs(scope, pairs, num_rows, std::max(1, ceil_log2(num_bags)));
  SOK_LAUNCH(order_kernel, ceil_div(num_rows, kThreads), scope.stream(), pairs.values[1], num_rows, order);
  SOK_LAUNCH(splits_kernel, ceil_div(num_bags + 1, kThreads), scope.stream(), pairs.keys[1], num_rows, num_bags,
             row_splits);
  report.finish();
}

}  // namespace sok::cuda
