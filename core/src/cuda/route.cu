// SPDX-License-Identifier: Apache-2.0
// route: the keys of a batch -> unique keys in send order, and the way back. All keys of the call are sorted by one
// number, (owner, table, slot), with room for as many slots on every rank as the largest share has. Where any integer
// is a key of a table that takes more than 64 bits: all are sorted by key, and then by (owner, table).
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

struct RoutedTable {
  Placement placement;
  int32_t number;        // what a report calls it
  int64_t first_number;  // of its slot 0 on rank 0
  int64_t dimension;
};

struct RoutedLookup {
  const void* keys;
  const int64_t* row_splits;  // nullptr: each key is a bag
  int64_t first_entry;
  int64_t first_split;  // of its row splits among those of the call
  int64_t num_keys;
  int64_t num_bags;
  int32_t table;
  bool keys_64bit;
};

struct Route {
  const RoutedTable* tables;
  const RoutedLookup* lookups;
  uint32_t num_tables, num_lookups, num_groups;  // groups: (rank, table)
  int64_t num_entries, num_splits;
  int64_t numbers_of_rank;
  const int64_t* sums;     // [ranks] elements behind the rows of each
  int64_t* group_first;    // [num_groups + 1] the first unique key of each
  int64_t* group_element;  // [num_groups] where its rows begin
  Routing out;
  sok_error_record* errors;
};

// No later stage needs right row splits of route; they are checked here so that all ranks learn of wrong ones with the
// counts.
__device__ __forceinline__ void check_split(const Route& p, int64_t i) {
  const RoutedLookup& lookup =
      p.lookups[last_at_or_before(p.num_lookups, i, [&](uint32_t at) { return __ldg(&p.lookups[at].first_split); })];
  const int64_t bag = i - lookup.first_split;
  if (is_split(lookup.row_splits, bag, lookup.num_bags, lookup.num_keys)) return;
  report(p.errors, Fault::kRowSplits, p.tables[lookup.table].number, bag, lookup.num_keys);
}

// An entry's key and where it belongs; a key that the table does not have is reported.
struct RoutedKey {
  const RoutedTable& table;
  int64_t key;
  uint32_t table_of_call;
  bool is_inside;
};

__device__ __forceinline__ RoutedKey key_of(const Route& p, int64_t i) {
  const RoutedLookup& lookup =
      p.lookups[last_at_or_before(p.num_lookups, i, [&](uint32_t at) { return __ldg(&p.lookups[at].first_entry); })];
  const RoutedTable& table = p.tables[lookup.table];
  const int64_t key = load_integer(lookup.keys, lookup.keys_64bit, i - lookup.first_entry);
  return {table, key, static_cast<uint32_t>(lookup.table), contains(table.placement, table.number, key, p.errors)};
}

// What entries are sorted by: their number, or, as the first step where any integer is a key, the key itself.
template <typename Number, bool kIsKey>
__global__ void __launch_bounds__(kThreads)
    numbers_kernel(const __grid_constant__ Route p, Number* numbers, uint32_t* entries) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < p.num_splits) check_split(p, i);
  if (i >= p.num_entries) return;
  const RoutedKey routed = key_of(p, i);
  if constexpr (kIsKey) {
    numbers[i] = static_cast<Number>(routed.key) ^ (Number{1} << 63);  // ascending as signed numbers
  } else {
    int64_t number = 0;
    if (routed.is_inside) {
      const Home home = routed.table.placement.home_of(routed.key);
      number = home.rank * p.numbers_of_rank + routed.table.first_number + home.slot;
    }
    numbers[i] = static_cast<Number>(number);
  }
  entries[i] = static_cast<uint32_t>(i);
}

__device__ __forceinline__ GroupedKey grouped_key(const Route& p, int64_t i) {
  const RoutedKey routed = key_of(p, i);
  const auto rank = static_cast<uint32_t>(routed.table.placement.home_of(routed.key).rank);
  return {routed.key, rank * p.num_tables + routed.table_of_call};
}

__global__ void __launch_bounds__(kThreads)
    entry_groups_kernel(const __grid_constant__ Route p, const uint32_t* entries, uint32_t* groups) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < p.num_entries) groups[i] = grouped_key(p, entries[i]).group;
}

__global__ void __launch_bounds__(kThreads)
    grouped_keys_kernel(const __grid_constant__ Route p, const uint32_t* entries, GroupedKey* numbers) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < p.num_entries) numbers[i] = grouped_key(p, entries[i]);
}

// What a number stands for.
struct Place {
  uint32_t group, table;
  int64_t key;
};

__device__ __forceinline__ Place place_of(const Route& p, int64_t number) {
  const int64_t rank = number / p.numbers_of_rank;
  const int64_t rest = number - rank * p.numbers_of_rank;
  const uint32_t table =
      last_at_or_before(p.num_tables, rest, [&](uint32_t at) { return __ldg(&p.tables[at].first_number); });
  const Home home = {static_cast<int32_t>(rank), rest - p.tables[table].first_number};
  return {static_cast<uint32_t>(rank) * p.num_tables + table, table, p.tables[table].placement.key_of(home)};
}
__device__ __forceinline__ Place place_of(const Route& p, uint32_t number) {
  return place_of(p, static_cast<int64_t>(number));
}
__device__ __forceinline__ Place place_of(const Route& p, uint64_t number) {
  return place_of(p, static_cast<int64_t>(number));
}
__device__ __forceinline__ Place place_of(const Route& p, const GroupedKey& number) {
  return {number.group, number.group % p.num_tables, number.key};
}

// Sorted numbers, and the numbers of their runs -> unique keys, their entries, and where groups begin.
template <typename Number>
__global__ void __launch_bounds__(kThreads) uniques_kernel(const __grid_constant__ Route p, const Number* numbers,
                                                           const uint32_t* entries, const uint32_t* runs) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.num_entries) return;
  p.out.order[i] = static_cast<int32_t>(entries[i]);
  const bool first = i == 0 || !(numbers[i] == numbers[i - 1]), last = i + 1 == p.num_entries;
  if (!first && !last) return;
  const uint32_t unique = runs[i];
  const Place place = place_of(p, numbers[i]);
  if (first) {
    p.out.keys[unique] = place.key;
    p.out.unique_splits[unique] = static_cast<int32_t>(i);
    for (uint32_t g = i > 0 ? place_of(p, numbers[i - 1]).group + 1 : 0; g <= place.group; ++g) {
      p.group_first[g] = unique;
    }
  }
  if (last) {
    p.out.unique_splits[unique + 1] = static_cast<int32_t>(p.num_entries);
    for (uint32_t g = place.group + 1; g <= p.num_groups; ++g) p.group_first[g] = int64_t{unique} + 1;
  }
}

// Of the rows of a group, and of the sums behind those of the last one of a rank.
__device__ __forceinline__ int64_t elements_of(const Route& p, uint32_t group) {
  const uint32_t rank = group / p.num_tables, table = group - rank * p.num_tables;
  const int64_t rows = (p.group_first[group + 1] - p.group_first[group]) * p.tables[table].dimension;
  return table + 1 == p.num_tables ? rows + p.sums[rank] : rows;
}

// One block: counts, and where the rows of each group begin in the messages.
__global__ void __launch_bounds__(kThreads) groups_kernel(const __grid_constant__ Route p) {
  __shared__ int64_t sums[kThreads];
  const uint32_t share = (p.num_groups + kThreads - 1) / kThreads;
  const uint32_t begin = min(threadIdx.x * share, p.num_groups), end = min(begin + share, p.num_groups);
  int64_t sum = 0;
  for (uint32_t g = begin; g < end; ++g) {
    p.out.counts.keys(g / p.num_tables, g % p.num_tables) = p.group_first[g + 1] - p.group_first[g];
    sum += elements_of(p, g);
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  int64_t element = 0;
  for (uint32_t t = 0; t < threadIdx.x; ++t) element += sums[t];
  for (uint32_t g = begin; g < end; ++g) {
    p.group_element[g] = element;
    element += elements_of(p, g);
  }
  const int64_t others = p.out.counts.num_columns - p.num_tables;
  for (int64_t i = threadIdx.x; i < p.out.counts.num_ranks * others; i += kThreads) {
    p.out.counts.keys(i / others, p.num_tables + i % others) = 0;
  }
}

template <typename Number>
__global__ void __launch_bounds__(kThreads) inverse_kernel(const __grid_constant__ Route p, const Number* numbers,
                                                           const uint32_t* entries, const uint32_t* runs) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.num_entries) return;
  const Place place = place_of(p, numbers[i]);
  p.out.inverse[entries[i]] =
      p.group_element[place.group] + (runs[i] - p.group_first[place.group]) * p.tables[place.table].dimension;
}

// Of no keys.
void write_nothing(const Scope& scope, const Routing& out) {
  const int64_t num_counts = out.counts.num_ranks * out.counts.num_columns;
  if (num_counts > 0) {
    SOK_CUDA_CHECK(
        cudaMemsetAsync(out.counts.data, 0, static_cast<size_t>(num_counts) * sizeof(int64_t), scope.stream()));
  }
  SOK_CUDA_CHECK(cudaMemsetAsync(out.unique_splits, 0, sizeof(int32_t), scope.stream()));
}

// Of sorted numbers.
template <typename Number>
void write_routing(const Scope& scope, const Route& p, const Number* numbers, const uint32_t* entries) {
  const int64_t n = p.num_entries, blocks = ceil_div(n, kThreads);
  const Buffer<uint32_t> runs(scope.context(), n);
  number_runs(scope, numbers, runs.data(), n);
  SOK_LAUNCH(uniques_kernel<Number>, blocks, scope.stream(), p, numbers, entries, runs.data());
  SOK_LAUNCH(groups_kernel, 1, scope.stream(), p);
  SOK_LAUNCH(inverse_kernel<Number>, blocks, scope.stream(), p, numbers, entries, runs.data());
}

template <typename Number, bool kIsKey>
void run(const Scope& scope, const Route& p, int bits) {
  const sok_context& context = scope.context();
  const int64_t n = p.num_entries;
  const Buffer<Number> numbers(context, n), other_numbers(context, n);
  const Buffer<uint32_t> entries(context, n), other_entries(context, n);
  SOK_LAUNCH((numbers_kernel<Number, kIsKey>), ceil_div(std::max(n, p.num_splits), kThreads), scope.stream(), p,
             numbers.data(), entries.data());
  if (n == 0) return write_nothing(scope, p.out);
  Pairs<Number> pairs = {{numbers.data(), other_numbers.data()}, {entries.data(), other_entries.data()}};
  sort_pairs(scope, pairs, n, bits);
  if constexpr (kIsKey) {
    const int64_t blocks = ceil_div(n, kThreads);
    const Buffer<uint32_t> groups(context, n), other_groups(context, n);
    Pairs<uint32_t> sorted = {{groups.data(), other_groups.data()}, {pairs.values[1], pairs.values[0]}};
    SOK_LAUNCH(entry_groups_kernel, blocks, scope.stream(), p, sorted.values[0], groups.data());
    sort_pairs(scope, sorted, n, std::max(1, ceil_log2(p.num_groups)));
    const Buffer<GroupedKey> grouped(context, n);
    SOK_LAUNCH(grouped_keys_kernel, blocks, scope.stream(), p, sorted.values[1], grouped.data());
    write_routing(scope, p, static_cast<const GroupedKey*>(grouped.data()), sorted.values[1]);
  } else {
    write_routing(scope, p, static_cast<const Number*>(pairs.keys[1]), pairs.values[1]);
  }
}

}  // namespace

void route(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
           const std::vector<int64_t>& sums, const Routing& routing) {
  const Scope scope(context);
  const Report report(scope);
  if (lookups.empty()) {
    write_nothing(scope, routing);
    report.finish();
    return;
  }
  const int64_t num_ranks = tables.empty() ? 1 : tables.front().placement.num_ranks;
  std::vector<RoutedTable> views;
  std::vector<RoutedLookup> looks;
  bool takes_any_key = false;
  Route p = {};
  for (size_t t = 0; t < tables.size(); ++t) {
    const Placement& placement = tables[t].placement;
    views.push_back({placement, tables[t].number, p.numbers_of_rank, tables[t].dimension});
    p.numbers_of_rank += placement.local_rows(std::max(0, placement.owner));  // of the rank that has the most
    takes_any_key |= placement.num_rows == Placement::kAnyKey;
  }
  for (const Lookup& lookup : lookups) {
    looks.push_back({lookup.keys.data, lookup.row_splits, lookup.first_entry, p.num_splits, lookup.keys.size,
                     lookup.num_bags, lookup.table, lookup.keys.is_64bit});
    if (lookup.row_splits != nullptr) p.num_splits += lookup.num_bags + 1;
  }
  p.num_tables = static_cast<uint32_t>(tables.size());
  p.num_lookups = static_cast<uint32_t>(looks.size());
  p.num_groups = static_cast<uint32_t>(num_ranks * static_cast<int64_t>(tables.size()));
  p.num_entries = sok::count_entries(lookups);
  p.out = routing;
  p.errors = report.errors();
  const Buffer<int64_t> group_first(scope.context(), p.num_groups + 1), group_element(scope.context(), p.num_groups);
  p.group_first = group_first.data();
  p.group_element = group_element.data();
  Upload upload;
  const size_t tables_place = upload.add(views), lookups_place = upload.add(looks), sums_place = upload.add(sums);
  upload.send(scope);
  p.tables = upload.at<RoutedTable>(tables_place);
  p.lookups = upload.at<RoutedLookup>(lookups_place);
  p.sums = upload.at<int64_t>(sums_place);
  const int64_t num_numbers = p.numbers_of_rank * num_ranks;
  const int bits = std::max(1, ceil_log2(num_numbers));
  if (takes_any_key) {
    run<uint64_t, true>(scope, p, 64);
  } else if (num_numbers < int64_t{UINT32_MAX}) {
    run<uint32_t, false>(scope, p, bits);
  } else {
    run<uint64_t, false>(scope, p, bits);
  }
  report.finish(tables);
}

}  // namespace sok::cuda
