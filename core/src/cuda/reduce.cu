// SPDX-License-Identifier: Apache-2.0
// reduce: the gradient of a table as distinct slots and their sums.
#include "cuda/entries.h"
#include "cuda/launch.h"
#include "cuda/report.cuh"
#include "cuda/segments.h"
#include "cuda/sort.h"
#include "cuda/stages.h"

namespace sok::cuda {
namespace {

constexpr uint32_t kPadding = UINT32_MAX;

// Sorted keys, which are slots, and the numbers of their runs -> the slots, and numbers in which padding is told apart.
template <typename Key>
__global__ void __launch_bounds__(kThreads)
    slots_kernel(const Key* keys, int64_t size, Key padding, uint32_t* numbers, int64_t* slots, int64_t* count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= size) return;
  const Key key = keys[i];
  if (key == padding) {
    numbers[i] = kPadding;
    return;
  }
  const uint32_t number = numbers[i];
  if (i == 0 || keys[i - 1] != key) slots[number] = static_cast<int64_t>(key);
  if (i + 1 == size || keys[i + 1] == padding) *count = int64_t{number} + 1;
}

template <typename Key>
void run(const Scope& scope, const Report& report, const Columns& table, const std::vector<Gradient>& gradients,
         int64_t* slots, float* values, int64_t* count) {
  const sok_context& context = scope.context();
  std::vector<EntryPart> parts;
  SegmentGroup group;
  SegmentTable sums = {};
  sums.padding_key = kPadding;
  sums.weight = values;
  sums.dimension = sums.stride = static_cast<uint32_t>(table.dimension);
  bool aligned = is_aligned(values), plain = gradients.size() == 1;
  int64_t size = 0;
  for (const Gradient& gradient : gradients) {
    EntryPart part = make_entry_part(gradient, table, 0, size);
    aligned = aligned && are_aligned(gradient.values);
    plain = plain && gradient.weights == nullptr && BagNumbers::exist(gradient.values) &&
            (gradient.row_splits == nullptr || gradient.combiner == SOK_SUM);
    sums.values = gradient.values.data;
    sums.value_stride = static_cast<uint32_t>(BagNumbers::stride(gradient.values));
    size += gradient.slots.size;
    parts.push_back(part);
  }
  const int64_t padded = round_up(size, kChunk);
  if (padded > size) parts.push_back(make_padding(table, 0, size, padded - size));
  group.width = width_of(table.dimension, aligned);
  group.log_lanes = log_lanes_of(table.dimension, group.width);
  group.tables.push_back(sums);
  group.first_entries.push_back(0);
  group.num_entries.push_back(padded);

  const Buffer<int32_t> gate(context, 1);
  const Buffer<Key> keys(context, padded), other_keys(context, padded);
  const Buffer<uint32_t> numbers(context, padded), other_numbers(context, padded), runs(context, padded);
  const Buffer<EntrySource> sources(context, plain ? 0 : padded);
  Upload upload;
  const EntryPlan entries(std::move(parts), plain ? EntryValues::kRows : EntryValues::kSources, upload);
  const SegmentPlan plan(group, upload);
  upload.send(scope, gate.data(), report.errors());
  entries.run(scope, upload, keys.data(), numbers.data(), sources.data(), gate.data(), report.errors());
  Pairs<Key> pairs = {{keys.data(), other_keys.data()}, {numbers.data(), other_numbers.data()}};
  sort_pairs(scope, pairs, padded, ceil_log2(table.num_slots + 1));
  number_runs(scope, pairs.keys[1], runs.data(), padded);
  SOK_LAUNCH(slots_kernel<Key>, ceil_div(padded, kThreads), scope.stream(), pairs.keys[1], padded,
             static_cast<Key>(table.num_slots), runs.data(), slots, count);
  plan.run(scope, upload, runs.data(), pairs.values[1], sources.data(), gate.data());
}

}  // namespace

void reduce(const sok_context& context, const Columns& table, const std::vector<Gradient>& gradients, int64_t* slots,
            float* values, int64_t* count) {
  const Scope scope(context);
  const Report report(scope);
  SOK_CUDA_CHECK(cudaMemsetAsync(count, 0, sizeof(int64_t), scope.stream()));
  if (!gradients.empty()) {
    if (table.num_slots < int64_t{UINT32_MAX}) {
      run<uint32_t>(scope, report, table, gradients, slots, values, count);
    } else {
      run<uint64_t>(scope, report, table, gradients, slots, values, count);
    }
  }
  report.finish(table);
}

}  // namespace sok::cuda
