// SPDX-License-Identifier: Apache-2.0
// route_bags: the keys of a batch -> the same keys in send order, and which of each rank's keys belong to which bag.
// The entries of the call are sorted by owner alone, which keeps those of a rank in order: the row splits of its parts
// are found in the sorted list by binary search, whatever the lengths of the bags.
#include "cuda/launch.h"
#include "cuda/placement.cuh"
#include "cuda/report.cuh"
#include "cuda/sort.h"
#include "cuda/splits.cuh"
#include "cuda/stages.h"
#include "cuda/upload.h"
#include "cuda/vector.cuh"

namespace sok::cuda {
namespace {

struct RoutedLookup {
  const void* keys;
  const int64_t* row_splits;  // nullptr: each key is a bag
  Placement placement;
  int32_t table;   // what a report calls it
  int32_t number;  // in the call
  int64_t first_entry;
  int64_t num_keys;
  int64_t num_bags;
  bool keys_64bit;

  __device__ int64_t split(int64_t bag) const { return row_splits == nullptr ? bag : __ldg(row_splits + bag); }
  // Splits that do not rise from 0 to num_keys have been reported; here they only may not lead outside.
  __device__ int64_t safe_split(int64_t bag) const { return min(max(split(bag), int64_t{0}), num_keys); }
};

struct Route {
  const RoutedLookup* lookups;
  const BagPart* parts;
  uint32_t num_lookups, num_parts, num_groups;  // groups: (rank, lookup)
  int64_t num_entries, num_splits;
  int64_t* group_first;  // [num_groups] the first of its sorted entries
  Routing out;
  sok_error_record* errors;
};

__device__ __forceinline__ const RoutedLookup& lookup_of(const Route& p, int64_t entry) {
  return p
      .lookups[last_at_or_before(p.num_lookups, entry, [&](uint32_t at) { return __ldg(&p.lookups[at].first_entry); })];
}

__global__ void __launch_bounds__(kThreads)
    owners_kernel(const __grid_constant__ Route p, uint32_t* owners, uint32_t* entries) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.num_entries) return;
  const RoutedLookup& lookup = lookup_of(p, i);
  const int64_t key = load_integer(lookup.keys, lookup.keys_64bit, i - lookup.first_entry);
  const bool inside = contains(lookup.placement, lookup.table, key, p.errors);
  owners[i] = inside ? static_cast<uint32_t>(lookup.placement.home_of(key).rank) : 0;
  entries[i] = static_cast<uint32_t>(i);
}

__global__ void __launch_bounds__(kThreads) keys_kernel(const __grid_constant__ Route p, const uint32_t* entries) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.num_entries) return;
  const int64_t entry = entries[i];
  const RoutedLookup& lookup = lookup_of(p, entry);
  p.out.bag_keys[i] = load_integer(lookup.keys, lookup.keys_64bit, entry - lookup.first_entry);
}

// The first position in [begin, end) of the sorted list, sorted by (owner, entry), that is not below the given pair.
__device__ __forceinline__ int64_t position_of(const uint32_t* owners, const uint32_t* entries, int64_t begin,
                                               int64_t end, uint32_t owner, int64_t entry) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    const uint32_t other = owners[middle];
    if (other < owner || (other == owner && entries[middle] < entry)) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

__global__ void __launch_bounds__(kThreads)
    groups_kernel(const __grid_constant__ Route p, const uint32_t* owners, const uint32_t* entries) {
  const uint32_t group = blockIdx.x * kThreads + threadIdx.x;
  if (group >= p.num_groups) return;
  const uint32_t rank = group / p.num_lookups;
  const RoutedLookup& lookup = p.lookups[group - rank * p.num_lookups];
  const int64_t begin = position_of(owners, entries, 0, p.num_entries, rank, lookup.first_entry);
  const int64_t end = position_of(owners, entries, begin, p.num_entries, rank, lookup.first_entry + lookup.num_keys);
  p.group_first[group] = begin;
  p.out.counts.bag_keys(rank, lookup.number) = end - begin;
  p.out.counts.bag_splits(rank, lookup.number) =
      lookup.placement.lives_on(static_cast<int32_t>(rank)) ? lookup.num_bags + 1 : 0;
}

__global__ void __launch_bounds__(kThreads)
    splits_kernel(const __grid_constant__ Route p, const uint32_t* owners, const uint32_t* entries) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.num_splits) return;
  const BagPart& part =
      p.parts[last_at_or_before(p.num_parts, i, [&](uint32_t at) { return __ldg(&p.parts[at].first_split); })];
  const RoutedLookup& lookup = p.lookups[part.lookup];
  const int64_t bag = i - part.first_split;
  if (lookup.row_splits != nullptr && !is_split(lookup.row_splits, bag, lookup.num_bags, lookup.num_keys)) {
    report(p.errors, Fault::kRowSplits, lookup.table, bag, lookup.num_keys);
  }
  const int64_t safe = lookup.safe_split(bag);
  if (lookup.placement.owner >= 0 || lookup.placement.num_ranks == 1) {
    p.out.bag_splits[i] = safe;  // all keys are this rank's
    return;
  }
  const uint32_t group = static_cast<uint32_t>(part.rank) * p.num_lookups + static_cast<uint32_t>(part.lookup);
  const int64_t begin = p.group_first[group], end = begin + p.out.counts.bag_keys(part.rank, lookup.number);
  p.out.bag_splits[i] =
      position_of(owners, entries, begin, end, static_cast<uint32_t>(part.rank), lookup.first_entry + safe) - begin;
}

}  // namespace

void route_bags(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
                const BagParts& parts, const Routing& routing) {
  const Scope scope(context);
  const Report report(scope);
  const int64_t num_ranks = tables.empty() ? 1 : tables.front().placement.num_ranks;
  std::vector<RoutedLookup> looks;
  for (const Lookup& lookup : lookups) {
    const Table& table = tables[static_cast<size_t>(lookup.table)];
    looks.push_back({lookup.keys.data, lookup.row_splits, table.placement, table.number, lookup.number,
                     lookup.first_entry, lookup.keys.size, lookup.num_bags, lookup.keys.is_64bit});
  }
  Route p = {};
  p.num_lookups = static_cast<uint32_t>(looks.size());
  p.num_parts = static_cast<uint32_t>(parts.parts().size());
  p.num_groups = static_cast<uint32_t>(num_ranks * static_cast<int64_t>(looks.size()));
  p.num_entries = sok::count_entries(lookups);
  p.num_splits = parts.num_splits();
  p.out = routing;
  p.errors = report.errors();
  if (p.num_lookups > 0) {
    const Buffer<int64_t> group_first(scope.context(), p.num_groups);
    p.group_first = group_first.data();
    Upload upload;
    const size_t lookups_place = upload.add(looks), parts_place = upload.add(parts.parts());
    upload.send(scope);
    p.lookups = upload.at<RoutedLookup>(lookups_place);
    p.parts = upload.at<BagPart>(parts_place);
    const int64_t n = p.num_entries;
    const Buffer<uint32_t> owners(scope.context(), n), other_owners(scope.context(), n);
    const Buffer<uint32_t> entries(scope.context(), n), other_entries(scope.context(), n);
    SOK_LAUNCH(owners_kernel, ceil_div(n, kThreads), scope.stream(), p, owners.data(), entries.data());
    Pairs<uint32_t> pairs = {{owners.data(), other_owners.data()}, {entries.data(), other_entries.data()}};
    sort_pairs(scope, pairs, n, std::max(1, ceil_log2(num_ranks)));
    SOK_LAUNCH(keys_kernel, ceil_div(n, kThreads), scope.stream(), p, pairs.values[1]);
    SOK_LAUNCH(groups_kernel, ceil_div(p.num_groups, kThreads), scope.stream(), p, pairs.keys[1], pairs.values[1]);
    SOK_LAUNCH(splits_kernel, ceil_div(p.num_splits, kThreads), scope.stream(), p, pairs.keys[1], pairs.values[1]);
  }
  report.finish(tables);
}

}  // namespace sok::cuda
