// SPDX-License-Identifier: Apache-2.0
// spread: output gradients -> one gradient for each unique key. The entries of a key lie side by side in `order`, so
// the sums are those of segments.h with the number of the unique key as the key.
#include <set>

#include "cuda/entries.h"
#include "cuda/launch.h"
#include "cuda/placement.cuh"
#include "cuda/report.cuh"
#include "cuda/segments.h"
#include "cuda/splits.cuh"
#include "cuda/stages.h"

namespace sok::cuda {
namespace {

constexpr uint32_t kPadding = UINT32_MAX;

struct Bucket {  // the unique keys of one rank and table
  int64_t first;
  int64_t first_element;
  int64_t dimension;
};

struct Uniques {
  const Bucket* buckets;  // with a last one that holds nothing
  uint32_t num_buckets;
  uint32_t num_uniques;
  uint32_t num_entries;
  const int32_t* order;
  const int32_t* splits;
  const EntrySource* sources;
};

__device__ __forceinline__ const Bucket& bucket_of(const Uniques& p, uint32_t unique) {
  return p.buckets[last_at_or_before(p.num_buckets, unique, [&](uint32_t at) { return __ldg(&p.buckets[at].first); })];
}

__global__ void __launch_bounds__(kThreads) offsets_kernel(const __grid_constant__ Uniques p, int64_t* offsets) {
  const uint32_t unique = blockIdx.x * kThreads + threadIdx.x;
  if (unique >= p.num_uniques) return;
  const Bucket& bucket = bucket_of(p, unique);
  offsets[unique] = bucket.first_element + (unique - bucket.first) * bucket.dimension;
}

// keys, values: [num_entries], padded. Unique keys whose rows are not of `dimension` become padding (0: all are kept).
__global__ void __launch_bounds__(kThreads)
    uniques_kernel(const __grid_constant__ Uniques p, int64_t dimension, uint32_t* keys, uint32_t* values,
                   uint32_t padded, int32_t* gate, sok_error_record* errors) {
  __shared__ uint32_t ends[kThreads + 1];
  __shared__ int64_t dimensions[kThreads];
  if (blockIdx.x == 0) {
    for (uint32_t i = p.num_entries + threadIdx.x; i < padded; i += kThreads) keys[i] = kPadding, values[i] = kNoRow;
  }
  const uint32_t first = blockIdx.x * kThreads;
  const uint32_t count = min(static_cast<uint32_t>(kThreads), p.num_uniques - first);
  if (!load_splits(p.splits, p.num_uniques, p.num_entries, first, count, -1, ends, errors)) {
    if (threadIdx.x == 0) *gate = 1;
    return;
  }
  if (threadIdx.x < count) dimensions[threadIdx.x] = bucket_of(p, first + threadIdx.x).dimension;
  __syncthreads();
  for (uint32_t i = ends[0] + threadIdx.x; i < ends[count]; i += kThreads) {
    const uint32_t at = last_at_or_before(count, i, [&](uint32_t u) { return static_cast<int64_t>(ends[u]); });
    const int32_t entry = p.order[i];
    // An entry of a table with longer or shorter rows is none of this key's.
    const bool fits = static_cast<uint32_t>(entry) < p.num_entries && p.sources[entry].dimension == dimensions[at];
    if (!fits) {
      report(errors, Fault::kRouting, -1, entry, p.num_entries);
      *gate = 1;
    }
    const bool kept = fits && (dimension == 0 || dimensions[at] == dimension);
    keys[i] = kept ? first + at : kPadding;
    values[i] = kept ? static_cast<uint32_t>(entry) : kNoRow;
  }
}

}  // namespace

void spread(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
            const std::vector<Vectors>& output_gradients, const UniqueRows& unique_rows, float* gradients) {
  const Scope scope(context);
  const Report report(scope);
  const int64_t entries = sok::count_entries(lookups);
  const int32_t num_ranks = tables.empty() ? 0 : tables.front().placement.num_ranks;
  std::vector<Bucket> buckets;
  std::set<int64_t> dimensions;
  int64_t uniques = 0, elements = 0;
  bool aligned = is_aligned(gradients), sums_between = false;
  const int64_t* count = unique_rows.counts;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    for (const Table& table : tables) {
      buckets.push_back({uniques, elements, table.dimension});
      if (*count > 0) dimensions.insert(table.dimension);
      aligned = aligned && table.dimension % 4 == 0;
      uniques += *count;
      elements += *count * table.dimension;
      ++count;
    }
    elements += unique_rows.sums[rank];
    sums_between = sums_between || unique_rows.sums[rank] > 0;
  }
  if (uniques == 0) {
    report.finish(tables);
    return;
  }
  std::vector<EntryPart> parts;
  for (size_t i = 0; i < lookups.size(); ++i) {
    const Lookup& lookup = lookups[i];
    const Table& table = tables[static_cast<size_t>(lookup.table)];
    EntryPart part = {};
    part.row_splits = lookup.row_splits;
    part.weights = lookup.weights;
    part.values = output_gradients[i];
    part.num_entries = static_cast<uint32_t>(lookup.keys.size);
    part.num_rows = static_cast<uint32_t>(lookup.num_bags);
    part.first_entry = static_cast<uint32_t>(lookup.first_entry);
    part.dimension = static_cast<uint32_t>(table.dimension);
    part.table = table.number;
    part.combiner = static_cast<uint8_t>(lookup.combiner);
    aligned = aligned && are_aligned(part.values);
    parts.push_back(part);
  }
  const int64_t padded = round_up(entries, kChunk);
  const bool mixed = dimensions.size() > 1, apart = mixed || sums_between;  // gradients, from key to key
  const Buffer<int32_t> gate(scope.context(), 1);
  const Buffer<int64_t> offsets(scope.context(), apart ? uniques : 0);
  const Buffer<EntrySource> sources(scope.context(), entries);
  const Buffer<uint32_t> keys(scope.context(), padded), values(scope.context(), padded);

  Upload upload;
  const size_t place = upload.add(buckets);
  const EntryPlan plan(std::move(parts), EntryValues::kSources, upload);
  std::vector<SegmentPlan> sums;
  for (const int64_t dimension : dimensions) {
    SegmentTable table = {};
    table.padding_key = kPadding;
    table.weight = gradients;
    table.offsets = apart ? offsets.data() : nullptr;
    table.dimension = table.stride = static_cast<uint32_t>(dimension);
    SegmentGroup group;
    group.width = width_of(dimension, aligned);
    group.log_lanes = log_lanes_of(dimension, group.width);
    group.tables.push_back(table);
    group.first_entries.push_back(0);
    group.num_entries.push_back(padded);
    sums.emplace_back(group, upload);
  }
  upload.send(scope, gate.data(), report.errors());
  plan.run<uint32_t>(scope, upload, nullptr, nullptr, sources.data(), gate.data(), report.errors());
  const Uniques p = {upload.at<Bucket>(place),
                     static_cast<uint32_t>(buckets.size()),
                     static_cast<uint32_t>(uniques),
                     static_cast<uint32_t>(entries),
                     unique_rows.order,
                     unique_rows.unique_splits,
                     sources.data()};
  const int64_t num_blocks = ceil_div(uniques, kThreads);
  if (apart) SOK_LAUNCH(offsets_kernel, num_blocks, scope.stream(), p, offsets.data());
  size_t next = 0;
  for (const int64_t dimension : dimensions) {
    SOK_LAUNCH(uniques_kernel, num_blocks, scope.stream(), p, mixed ? dimension : 0, keys.data(), values.data(),
               static_cast<uint32_t>(padded), gate.data(), report.errors());
    sums[next++].run(scope, upload, keys.data(), values.data(), sources.data(), gate.data());
  }
  report.finish(tables);
}

}  // namespace sok::cuda
