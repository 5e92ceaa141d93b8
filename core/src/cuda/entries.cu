// SPDX-License-Identifier: Apache-2.0
#include "cuda/entries.h"

#include "cuda/launch.h"
#include "cuda/report.cuh"
#include "cuda/splits.cuh"
#include "cuda/vector.cuh"

namespace sok::cuda {
namespace {

constexpr int kEntriesOfBlock = 4 * kThreads;  // of a part without row splits
constexpr int kBagsOfBlock = 2 * kThreads;     // of one with

template <typename Key>
struct List {
  const EntryPart* parts;
  uint32_t num_parts;
  EntryValues kind;
  Key* keys;  // nullptr: only sources are wanted
  uint32_t* values;
  EntrySource* sources;
  int32_t* gate;
  sok_error_record* errors;
};

// `row`: the entry's bag. A slot outside the table makes `wrong` the entry.
template <typename Key>
__device__ __forceinline__ void add_entry(const List<Key>& list, const EntryPart& part, uint32_t entry, uint32_t row,
                                          float scale, uint32_t& wrong) {
  const uint32_t at = part.first_entry + entry;
  const uint64_t padding = part.first_key + static_cast<uint64_t>(part.limit);
  if (list.keys != nullptr) {
    uint64_t key = padding;
    if (part.slots != nullptr) {
      const int64_t slot = load_integer(part.slots, part.slots_64bit, entry);
      if (static_cast<uint64_t>(slot) < static_cast<uint64_t>(part.limit)) {
        key = part.first_key + static_cast<uint64_t>(slot);
      } else {
        wrong = entry;
      }
    }
    list.keys[at] = static_cast<Key>(key);
    list.values[at] = part.slots == nullptr             ? kNoRow
                      : list.kind == EntryValues::kRows ? BagNumbers::of(part.values, row)
                                                        : at;
  }
  if (list.sources != nullptr) {
    EntrySource source;
    source.row = part.values.data != nullptr ? part.values.at(row) : nullptr;
    source.scale = scale;
    source.dimension = part.dimension;
    list.sources[at] = source;
  }
}

// At the end, where a call costs no registers that entries need.
template <typename Key>
__device__ __forceinline__ void report_slot(const List<Key>& list, const EntryPart& part, uint32_t entry) {
  report(list.errors, Fault::kSlot, part.table, load_integer(part.slots, part.slots_64bit, entry), part.limit);
  *list.gate = 1;
}

// Of an entry that is a bag of its own.
__device__ __forceinline__ float scale_alone(const EntryPart& part, uint32_t entry) {
  if (part.weights == nullptr) return 1.0f;
  const float weight = __ldg(part.weights + entry);
  if (part.combiner == SOK_SUM) return weight;
  const float divisor = part.combiner == SOK_SQRTN ? sqrtf(weight * weight) : weight;
  return divisor == 0.0f ? 0.0f : weight / divisor;
}

template <typename Key>
__global__ void __launch_bounds__(kThreads) entries_kernel(const __grid_constant__ List<Key> list) {
  __shared__ uint32_t ends[kBagsOfBlock + 1];
  __shared__ float factors[kBagsOfBlock];
  uint32_t low = 0, high = list.num_parts - 1;
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (__ldg(&list.parts[middle].first_block) <= blockIdx.x) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const EntryPart& part = list.parts[low];
  const uint32_t block = blockIdx.x - part.first_block;

  uint32_t wrong = UINT32_MAX;

  if (part.row_splits == nullptr) {
#pragma unroll
    for (int k = 0; k < kEntriesOfBlock / kThreads; ++k) {
      const uint32_t entry = block * kEntriesOfBlock + k * kThreads + threadIdx.x;
      if (entry >= part.num_entries) break;
      add_entry(list, part, entry, entry, scale_alone(part, entry), wrong);
    }
    if (wrong != UINT32_MAX) report_slot(list, part, wrong);
    return;
  }

  const uint32_t first = block * kBagsOfBlock;
  const uint32_t count = min(static_cast<uint32_t>(kBagsOfBlock), part.num_rows - first);
  if (!load_splits(part.row_splits, part.num_rows, part.num_entries, first, count, part.table, ends, list.errors)) {
    if (threadIdx.x == 0) *list.gate = 1;
    return;
  }
  const bool weighted = part.weights != nullptr;
  for (uint32_t bag = threadIdx.x; bag < count; bag += kThreads) {
    const uint32_t begin = ends[bag], end = ends[bag + 1];
    float divisor = begin == end ? 0.0f : 1.0f;
    if (part.combiner != SOK_SUM) {
      divisor = static_cast<float>(end - begin);
      if (weighted) {
        divisor = 0.0f;
        for (uint32_t e = begin; e < end; ++e) {
          const float w = __ldg(part.weights + e);
          divisor += part.combiner == SOK_SQRTN ? w * w : w;
        }
      }
      if (part.combiner == SOK_SQRTN) divisor = sqrtf(divisor);
    }
    const float factor = divisor == 0.0f ? 0.0f : 1.0f / divisor;
    factors[bag] = factor;
    if (part.row_scales != nullptr) part.row_scales[BagNumbers::of(part.values, first + bag)] = factor;
  }
  __syncthreads();
  const uint32_t begin = ends[0], end = ends[count];
  const float bags_of_entry = static_cast<float>(count) / static_cast<float>(end - begin);
  for (uint32_t entry = begin + threadIdx.x; entry < end; entry += kThreads) {
    uint32_t bag = 0, over = count;  // ends[bag] <= entry < ends[over]
    // Bags of one length are the rule: the guess is right, or one off, then.
    const uint32_t guess = min(static_cast<uint32_t>((entry - begin) * bags_of_entry), count - 1);
    if (ends[guess] <= entry) {
      bag = guess;
      if (ends[guess + 1] > entry) over = guess + 1;
    } else {
      over = guess;
      if (guess > 0 && ends[guess - 1] <= entry) bag = guess - 1;
    }
    while (over - bag > 1) {
      const uint32_t middle = (bag + over) / 2;
      if (ends[middle] <= entry) {
        bag = middle;
      } else {
        over = middle;
      }
    }
    const float weight = weighted ? __ldg(part.weights + entry) : 1.0f;
    add_entry(list, part, entry, first + bag, weight * factors[bag], wrong);
  }
  if (wrong != UINT32_MAX) report_slot(list, part, wrong);
}

}  // namespace

EntryPart make_entry_part(const Gradient& gradient, const Columns& owner, int64_t first_key, int64_t first_entry) {
  EntryPart part = {};
  part.slots = gradient.slots.data;
  part.slots_64bit = gradient.slots.is_64bit;
  part.row_splits = gradient.row_splits;
  part.weights = gradient.weights;
  part.values = gradient.values;
  part.first_key = static_cast<uint64_t>(first_key);
  part.limit = owner.num_slots;
  part.num_entries = static_cast<uint32_t>(gradient.slots.size);
  part.num_rows = static_cast<uint32_t>(gradient.num_rows);
  part.first_entry = static_cast<uint32_t>(first_entry);
  part.dimension = static_cast<uint32_t>(owner.dimension);
  part.table = owner.number;
  part.combiner = static_cast<uint8_t>(gradient.combiner);
  return part;
}

EntryPart make_padding(const Columns& owner, int64_t first_key, int64_t first_entry, int64_t count) {
  EntryPart part = {};
  part.first_key = static_cast<uint64_t>(first_key);
  part.limit = owner.num_slots;
  part.num_entries = static_cast<uint32_t>(count);
  part.first_entry = static_cast<uint32_t>(first_entry);
  return part;
}

EntryPlan::EntryPlan(std::vector<EntryPart> parts, EntryValues values, Upload& upload)
    : values_(values), num_parts_(static_cast<uint32_t>(parts.size())) {
  for (EntryPart& part : parts) {
    part.first_block = static_cast<uint32_t>(num_blocks_);
    num_blocks_ += part.row_splits != nullptr ? std::max<int64_t>(1, ceil_div(part.num_rows, kBagsOfBlock))
                                              : ceil_div(part.num_entries, kEntriesOfBlock);
  }
  parts_ = upload.add(parts);
}

template <typename Key>
void EntryPlan::run(const Scope& scope, const Upload& upload, Key* keys, uint32_t* values, EntrySource* sources,
                    int32_t* gate, sok_error_record* errors) const {
  const List<Key> list = {upload.at<EntryPart>(parts_), num_parts_, values_, keys, values, sources, gate, errors};
  SOK_LAUNCH(entries_kernel<Key>, num_blocks_, scope.stream(), list);
}

template void EntryPlan::run(const Scope&, const Upload&, uint32_t*, uint32_t*, EntrySource*, int32_t*,
                             sok_error_record*) const;
template void EntryPlan::run(const Scope&, const Upload&, uint64_t*, uint32_t*, EntrySource*, int32_t*,
                             sok_error_record*) const;

}  // namespace sok::cuda
