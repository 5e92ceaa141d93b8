// SPDX-License-Identifier: Apache-2.0
// spread: output gradients -> one gradient for each unique key, in send order.
#include <algorithm>
#include <vector>

#include "common/memory.h"
#include "cpu/contents.h"
#include "cpu/pool.h"
#include "cpu/stages.h"

namespace sok::cpu {
namespace {

// Where the gradient of each entry comes from.
struct EntrySources {
  Buffer<const float*> rows;
  Buffer<float> scales;    // empty when all are 1
  Buffer<int32_t> tables;  // of each entry
  Buffer<float> zeros;     // the row of outputs that have no gradient
};

EntrySources find_sources(const sok_context& context, const std::vector<Lookup>& lookups,
                          const std::vector<Vectors>& output_gradients) {
  const int64_t entries = count_entries(lookups);
  int64_t zeros = 0;
  bool scaled = false;
  for (size_t i = 0; i < lookups.size(); ++i) {
    const Lookup& lookup = lookups[i];
    check_split_ends(lookup);
    if (output_gradients[i].data == nullptr) zeros = std::max(zeros, lookup.id.dimension);
    scaled |= lookup.weights != nullptr || (lookup.combiner != SOK_SUM && lookup.row_splits != nullptr);
  }
  EntrySources sources = {Buffer<const float*>(context, entries), Buffer<float>(context, scaled ? entries : 0),
                          Buffer<int32_t>(context, entries), Buffer<float>(context, zeros)};
  std::fill(sources.zeros.data(), sources.zeros.data() + zeros, 0.0f);
  const Chunks chunks = chunk_bags(context, lookups);
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    const size_t i = static_cast<size_t>(range.item);
    const Lookup& lookup = lookups[i];
    check_splits(lookup, range.begin, range.end);
    const float** const rows = sources.rows.data() + lookup.first_entry;
    int32_t* const owners = sources.tables.data() + lookup.first_entry;
    float* const scales = scaled ? sources.scales.data() + lookup.first_entry : nullptr;
    if (scaled && lookup.weights != nullptr) {
      kernels().bag_scales(lookup.row_splits, lookup.weights, lookup.combiner, range.begin, range.end, scales);
    }
    for (int64_t bag = range.begin; bag < range.end; ++bag) {
      const int64_t first = first_of(lookup, bag), last = first_of(lookup, bag + 1);
      const Vectors& output = output_gradients[i];
      const float* const row = output.data != nullptr ? output.at(bag) : sources.zeros.data();
      std::fill(rows + first, rows + last, row);
      std::fill(owners + first, owners + last, lookup.table);
      if (scaled && lookup.weights == nullptr) {
        const float count = static_cast<float>(last - first);
        const float divisor = lookup.combiner == SOK_SUM    ? 1.0f
                              : lookup.combiner == SOK_MEAN ? count
                                                            : __builtin_sqrtf(count);
        std::fill(scales + first, scales + last, 1.0f / divisor);
      }
    }
  });
  return sources;
}

// The unique keys of one rank and table, in send order.
struct Bucket {
  int64_t first;    // unique key
  int64_t element;  // where its gradient is in the flat buffer
};

}  // namespace

void spread(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
            const std::vector<Vectors>& output_gradients, const UniqueRows& uniques, float* gradients) {
  const int32_t *const order = uniques.order, *const unique_splits = uniques.unique_splits;
  const EntrySources sources = find_sources(context, lookups, output_gradients);
  const int64_t entries = count_entries(lookups);
  const size_t num_tables = tables.size();
  const size_t num_buckets = num_tables == 0 ? 0 : num_tables * static_cast<size_t>(tables[0].placement.num_ranks);
  std::vector<Bucket> buckets;
  buckets.reserve(num_buckets);
  int64_t unique = 0, element = 0, rows = 0;
  for (size_t i = 0; i < num_buckets; ++i) {
    const int64_t elements = uniques.counts[i] * tables[i % num_tables].dimension;
    buckets.push_back({unique, element});
    unique += uniques.counts[i];
    element += elements + ((i + 1) % num_tables == 0 ? uniques.sums[i / num_tables] : 0);
    rows += elements;
  }
  const int64_t bytes = task_bytes(context, 8 * rows);
  Chunks chunks;
  for (size_t i = 0; i < num_buckets; ++i) {
    chunks.add(uniques.counts[i], items_per_task(bytes, 8 * tables[i % num_tables].dimension));
  }
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    const Bucket& bucket = buckets[static_cast<size_t>(range.item)];
    const Table& table = tables[static_cast<size_t>(range.item) % num_tables];
    const int32_t number = static_cast<int32_t>(&table - tables.data());
    const int64_t begin = bucket.first + range.begin, end = bucket.first + range.end;
    for (int64_t u = begin; u < end; ++u) {
      SOK_CHECK(0 <= unique_splits[u] && unique_splits[u] <= unique_splits[u + 1] && unique_splits[u + 1] <= entries,
                "table '", table.name, "': routing.unique_splits must not decrease nor pass ", entries, " but ",
                unique_splits[u], " is followed by ", unique_splits[u + 1], " at ", u);
    }
    for (int64_t i = unique_splits[begin]; i < unique_splits[end]; ++i) {
      SOK_CHECK(0 <= order[i] && order[i] < entries && sources.tables[order[i]] == number, "table '", table.name,
                "': routing.order[", i, "] is ", order[i], ", which is no entry of this table");
    }
    Segments segments = {};
    segments.rows = sources.rows.data();
    segments.scales = sources.scales.size() != 0 ? sources.scales.data() : nullptr;
    segments.order = reinterpret_cast<const uint32_t*>(order);
    segments.splits = unique_splits;
    segments.dimension = table.dimension;
    kernels().sum_segments(segments, begin, end, gradients + bucket.element + range.begin * table.dimension);
  });
}

}  // namespace sok::cpu
