// SPDX-License-Identifier: Apache-2.0
// apply: entries of all tables are sorted by (table, slot) at once; then each row is read, stepped and written once.
#include <map>
#include <tuple>

#include "common/optimizer_constants.h"
#include "cuda/entries.h"
#include "cuda/launch.h"
#include "cuda/report.cuh"
#include "cuda/segments.h"
#include "cuda/sort.h"
#include "cuda/stages.h"

namespace sok::cuda {
namespace {

// A table that keeps stamps, and its entries in the sorted list.
struct StampTable {
  uint64_t first_key;
  uint64_t padding_key;
  int64_t* stamps;
  int64_t stamp;
  int64_t first_entry;
  int64_t num_entries;
};

// After the optimizers, so that calls without stamps know nothing of them. The last entry of a run writes.
template <typename Key>
__global__ void __launch_bounds__(kThreads)
    stamp_kernel(const StampTable* tables, uint32_t num_tables, const Key* keys, const int32_t* gate) {
  if (*gate != 0) return;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (uint32_t table = blockIdx.y; table < num_tables; table += gridDim.y) {
    const StampTable t = tables[table];
    if (i >= t.num_entries) continue;
    const Key key = keys[t.first_entry + i];
    if (key == static_cast<Key>(t.padding_key)) continue;
    if (i + 1 < t.num_entries && keys[t.first_entry + i + 1] == key) continue;
    t.stamps[key - static_cast<Key>(t.first_key)] = t.stamp;
  }
}

// What was recorded since the gate was set stops the step too.
__global__ void close_gate_kernel(const sok_error_record* errors, int32_t* gate) {
  if (threadIdx.x == 0 && is_recorded(errors)) *gate = 1;
}

struct Work {
  std::vector<EntryPart> parts;
  std::vector<SegmentGroup> groups;
  std::vector<StampTable> stamped;
  EntryValues values = EntryValues::kRows;
  int64_t num_keys = 0;     // of all tables, padding keys too
  int64_t num_entries = 0;  // padded
  int64_t num_scales = 0;
  bool wide_keys = false;  // they take 64 bits
  bool sorted = false;     // or needs no order: every slot occurs once
};

int64_t count_entries(const Update& update) {
  int64_t entries = 0;
  for (const Gradient& gradient : update.gradients) entries += gradient.slots.size;
  return entries;
}

// Of a part without weights: each row has one scale.
bool has_scales(const Gradient& gradient) { return gradient.row_splits != nullptr && gradient.combiner != SOK_SUM; }

// Parts that can be told apart by a row number alone stay so; others get an EntrySource for each entry.
EntryValues values_of(const std::vector<Update>& updates) {
  for (const Update& update : updates) {
    if (update.gradients.size() > 1) return EntryValues::kSources;
    for (const Gradient& gradient : update.gradients) {
      if (gradient.weights != nullptr || !BagNumbers::exist(gradient.values)) return EntryValues::kSources;
    }
  }
  return EntryValues::kRows;
}

SegmentTable make_table(const Update& update, int64_t first_key) {
  SegmentTable table = {};
  table.first_key = static_cast<uint64_t>(first_key);
  table.padding_key = static_cast<uint64_t>(first_key + update.table.num_slots);
  table.weight = update.table.weight.data;
  std::copy(update.states, update.states + SOK_MAX_STATES, table.states);
  table.dimension = table.stride = static_cast<uint32_t>(update.table.dimension);
  table.constants = make_constants(update);
  return table;
}

bool is_aligned(const Update& update) {
  bool aligned = cuda::is_aligned(update.table.weight.data);
  for (int32_t s = 0; s < update.num_states; ++s) aligned = aligned && cuda::is_aligned(update.states[s]);
  for (const Gradient& gradient : update.gradients) aligned = aligned && are_aligned(gradient.values);
  return aligned;
}

// Tables that one kernel serves lie side by side in the list.
Work make_work(const std::vector<Update>& updates) {
  Work work;
  work.values = values_of(updates);
  work.sorted = true;
  int64_t num_keys = 0;
  for (const Update& update : updates) num_keys += update.table.num_slots + 1;
  work.wide_keys = num_keys >= int64_t{UINT32_MAX};
  using Kind = std::tuple<Rule, sok_dtype, int, int>;
  std::map<Kind, std::vector<size_t>> kinds;
  for (size_t i = 0; i < updates.size(); ++i) {
    const Update& update = updates[i];
    // Kernels for keys of 64 bits are only there for narrow accesses.
    const int width = width_of(update.table.dimension, is_aligned(update) && !work.wide_keys);
    const int log_lanes = log_lanes_of(update.table.dimension, width);
    kinds[{rule_of(make_constants(update)), update.table.weight.dtype, width, log_lanes}].push_back(i);
    const bool unique = update.gradients.size() == 1 && update.gradients.front().unique;
    work.sorted = work.sorted && (unique || count_entries(update) <= 1);
  }
  for (const auto& [kind, members] : kinds) {
    SegmentGroup group;
    std::tie(group.rule, group.dtype, group.width, group.log_lanes) = kind;
    for (const size_t i : members) {
      const Update& update = updates[i];
      SegmentTable table = make_table(update, work.num_keys);
      const int64_t first_entry = work.num_entries;
      for (const Gradient& gradient : update.gradients) {
        EntryPart part = make_entry_part(gradient, update.table, work.num_keys, work.num_entries);
        table.values = gradient.values.data;
        table.value_stride = static_cast<uint32_t>(BagNumbers::stride(gradient.values));
        if (work.values == EntryValues::kRows && has_scales(gradient)) {
          // Offsets for now: the array is not there yet. 1 is added so that 0 means none.
          part.row_scales = reinterpret_cast<float*>((work.num_scales + 1) * sizeof(float));
          table.row_scales = part.row_scales;
          work.num_scales += BagNumbers::limit(gradient.values, gradient.num_rows);
        }
        work.num_entries += gradient.slots.size;
        work.parts.push_back(part);
      }
      const int64_t padded = first_entry + round_up(work.num_entries - first_entry, kChunk);
      if (padded > work.num_entries) {
        work.parts.push_back(make_padding(update.table, work.num_keys, work.num_entries, padded - work.num_entries));
      }
      if (update.stamps != nullptr && padded > first_entry) {
        work.stamped.push_back(
            {table.first_key, table.padding_key, update.stamps, update.stamp, first_entry, padded - first_entry});
      }
      work.num_entries = padded;
      work.num_keys += update.table.num_slots + 1;
      group.tables.push_back(table);
      group.first_entries.push_back(first_entry);
      group.num_entries.push_back(padded - first_entry);
      SOK_CHECK(work.num_entries <= kMaxEntries, "the updates have ", work.num_entries,
                " slots together; a call takes fewer than 2^31");
    }
    work.groups.push_back(std::move(group));
  }
  return work;
}

void place_scales(Work& work, float* scales) {
  const auto place = [=](const float* offset) {
    return scales + (reinterpret_cast<size_t>(offset) / sizeof(float) - 1);
  };
  for (EntryPart& part : work.parts) {
    if (part.row_scales != nullptr) part.row_scales = place(part.row_scales);
  }
  for (SegmentGroup& group : work.groups) {
    for (SegmentTable& table : group.tables) {
      if (table.row_scales != nullptr) table.row_scales = place(table.row_scales);
    }
  }
}

template <typename Key>
void run(const Scope& scope, const Report& report, Work& work, const Agreement& agreement) {
  const sok_context& context = scope.context();
  const Buffer<float> scales(context, work.num_scales);
  const Buffer<int32_t> gate(context, 1);
  const Buffer<Key> keys(context, work.num_entries), other_keys(context, work.sorted ? 0 : work.num_entries);
  const Buffer<uint32_t> values(context, work.num_entries), other_values(context, work.sorted ? 0 : work.num_entries);
  const Buffer<EntrySource> sources(context, work.values == EntryValues::kSources ? work.num_entries : 0);
  place_scales(work, scales.data());

  Upload upload;
  const EntryPlan entries(work.parts, work.values, upload);
  std::vector<SegmentPlan> plans;
  for (const SegmentGroup& group : work.groups) plans.emplace_back(group, upload);
  const size_t stamped = upload.add(work.stamped);
  upload.send(scope, gate.data(), report.errors());
  entries.run(scope, upload, keys.data(), values.data(), sources.data(), gate.data(), report.errors());
  Pairs<Key> pairs = {{keys.data(), other_keys.data()}, {values.data(), other_values.data()}};
  if (work.sorted) {
    std::swap(pairs.keys[0], pairs.keys[1]);
    std::swap(pairs.values[0], pairs.values[1]);
  } else {
    sort_pairs(scope, pairs, work.num_entries, std::max(1, ceil_log2(work.num_keys)));
  }
  if (agreement.agree != nullptr) {
    agreement.ask();
    SOK_LAUNCH(close_gate_kernel, 1, scope.stream(), report.errors(), gate.data());
  }
  for (const SegmentPlan& plan : plans) {
    plan.run(scope, upload, pairs.keys[1], pairs.values[1], sources.data(), gate.data());
  }
  if (work.stamped.empty()) return;
  int64_t most_entries = 0;
  for (const StampTable& table : work.stamped) most_entries = std::max(most_entries, table.num_entries);
  const dim3 blocks(grid_of(ceil_div(most_entries, kThreads)),
                    static_cast<uint32_t>(std::min<size_t>(work.stamped.size(), 65535)));
  stamp_kernel<Key><<<blocks, kThreads, 0, scope.stream()>>>(
      upload.at<StampTable>(stamped), static_cast<uint32_t>(work.stamped.size()), pairs.keys[1], gate.data());
  SOK_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void apply(const sok_context& context, const std::vector<Update>& updates, const Agreement& agreement) {
  const Scope scope(context);
  const Report report(scope);
  Work work = make_work(updates);
  if (work.num_entries > 0 || !work.parts.empty()) {
    if (work.wide_keys) {
      run<uint64_t>(scope, report, work, agreement);
    } else {
      run<uint32_t>(scope, report, work, agreement);
    }
  } else {
    agreement.ask();
  }
  report.finish(updates);
}

}  // namespace sok::cuda
