// SPDX-License-Identifier: Apache-2.0
// route: the keys of a batch -> unique keys in send order, and the way back. Keys are sorted by a number for
// (owner, slot): of a static table below its number of rows, rounded up to whole rows of all ranks; else of 64 bits.
#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/contents.h"
#include "cpu/group.h"
#include "cpu/pool.h"
#include "cpu/stages.h"

namespace sok::cpu {
namespace {

constexpr int64_t kEntriesPerPiece = 1 << 15;

// Key <-> (owner, slot) as one number that sorts in send order: numbers of a rank begin where those of the rank before
// it end. Where any integer is a key there are 2^64 of them, on all ranks together.
class SendOrder {
 public:
  explicit SendOrder(const Placement& placement) : placement_(placement) {
    const auto num_ranks = static_cast<uint64_t>(placement.num_ranks);
    const bool is_any = placement.num_rows == Placement::kAnyKey;
    begins_.assign(num_ranks, 0);
    lowest_.assign(num_ranks, 0);
    if (placement.owner >= 0) {
      if (is_any) lowest_.assign(num_ranks, static_cast<uint64_t>(INT64_MIN));
      limit_ = is_any ? UINT64_MAX : static_cast<uint64_t>(placement.num_rows);
      return;
    }
    const Home lowest = placement.home_of(INT64_MIN);
    uint64_t begin = 0;
    for (uint64_t rank = 0; rank < num_ranks; ++rank) {
      begins_[rank] = begin;
      if (!is_any) {
        begin += static_cast<uint64_t>(placement.local_rows(0));  // the most
        continue;
      }
      // The rank's lowest key is so far from the lowest of all.
      const uint64_t after = (rank + num_ranks - static_cast<uint64_t>(lowest.rank)) % num_ranks;
      lowest_[rank] = static_cast<uint64_t>(lowest.slot) + (rank < static_cast<uint64_t>(lowest.rank) ? 1 : 0);
      begin += (UINT64_MAX - after) / num_ranks + 1;
    }
    limit_ = is_any ? UINT64_MAX : begin;
  }

  // Numbers are below it; UINT64_MAX: they may be any.
  uint64_t limit() const { return limit_; }

  uint64_t number(int64_t key) const {
    const Home home = placement_.home_of(key);
    const auto rank = static_cast<size_t>(home.rank);
    return begins_[rank] + (static_cast<uint64_t>(home.slot) - lowest_[rank]);
  }

  // Of a number that belongs to `rank`.
  int64_t key(uint64_t number, int32_t rank) const {
    const auto at = static_cast<size_t>(rank);
    const uint64_t slot = lowest_[at] + (number - begins_[at]);
    // The multiple of the lowest slots is below the lowest key.
    return static_cast<int64_t>(placement_.owner >= 0 ? slot : slot * static_cast<uint64_t>(placement_.num_ranks) + at);
  }

  // The unique keys of `rank` among those of a batch, [first, last).
  std::pair<int64_t, int64_t> find(const Group& group, int32_t rank) const {
    if (placement_.owner >= 0) return {0, rank == placement_.owner ? group.count : 0};
    const auto lower_bound = [&](size_t of) {
      if (of == begins_.size()) return group.count;
      int64_t low = 0, high = group.count;
      while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        group.key(middle) < begins_[of] ? low = middle + 1 : high = middle;
      }
      return low;
    };
    const auto at = static_cast<size_t>(rank);
    return {lower_bound(at), lower_bound(at + 1)};
  }

 private:
  Placement placement_;
  uint64_t limit_;
  std::vector<uint64_t> begins_, lowest_;  // the first number and the lowest slot of each rank
};

struct Member {  // a lookup of a table
  const Lookup* lookup;
  int64_t first;  // of its entries among those of the table
};

struct TablePlan {
  std::vector<Member> members;
  Chunks pieces;
};

template <typename Key, typename Entry>
void fill_entries(const SendOrder& send_order, const Member& member, int64_t begin, int64_t end, Entry* entries) {
  const Key* const keys = static_cast<const Key*>(member.lookup->keys.data);
  const uint32_t first_entry = static_cast<uint32_t>(member.lookup->first_entry);
  Entry* const out = entries + member.first;
  for (int64_t i = begin; i < end; ++i) {
    out[i] = Entry::make(send_order.number(static_cast<int64_t>(keys[i])), first_entry + static_cast<uint32_t>(i));
  }
}

}  // namespace

void route(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
           const std::vector<int64_t>& sums, const Routing& routing) {
  const size_t num_tables = tables.size();
  const int32_t num_ranks = tables.empty() ? 1 : tables.front().placement.num_ranks;
  std::vector<TablePlan> plans(num_tables);
  std::vector<SendOrder> send_orders;
  std::vector<GroupJob> jobs(num_tables);
  for (size_t t = 0; t < num_tables; ++t) {
    send_orders.emplace_back(tables[t].placement);
    jobs[t].limit = send_orders[t].limit();
  }
  for (const Lookup& lookup : lookups) {
    const size_t t = static_cast<size_t>(lookup.table);
    check_split_ends(lookup);
    check_splits(lookup, 0, lookup.num_bags);
    plans[t].members.push_back({&lookup, jobs[t].size});
    plans[t].pieces.add(lookup.keys.size, kEntriesPerPiece);
    jobs[t].size += lookup.keys.size;
    jobs[t].pieces = plans[t].pieces.count();
  }
  const Groups groups(context, jobs, [&](size_t t, int64_t piece, auto* entries) {
    const Chunks::Range range = plans[t].pieces[piece];
    const Member& member = plans[t].members[static_cast<size_t>(range.item)];
    check_keys(tables[t], member.lookup->keys, range.begin, range.end);
    if (member.lookup->keys.is_64bit) {
      fill_entries<int64_t>(send_orders[t], member, range.begin, range.end, entries);
    } else {
      fill_entries<int32_t>(send_orders[t], member, range.begin, range.end, entries);
    }
  });

  // Buckets (rank, table) in send order: where they begin among the groups of their table and in each output.
  struct Bucket {
    int64_t group, unique, entry, element;
  };
  std::vector<Bucket> buckets;
  Chunks chunks;
  int64_t unique = 0, entry = 0, element = 0;
  const CountMatrix& counts = routing.counts;
  std::fill(counts.data, counts.data + counts.num_ranks * counts.num_columns, 0);
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    for (size_t t = 0; t < num_tables; ++t) {
      const Group& group = groups[t];
      const auto [begin, end] = send_orders[t].find(group, rank);
      const int64_t count = end - begin;
      counts.keys(rank, static_cast<int64_t>(t)) = count;
      buckets.push_back({begin, unique, entry, element});
      chunks.add(count, 1 << 13);
      unique += count;
      entry += count == 0 ? 0 : group.splits[end] - group.splits[begin];
      element += count * tables[t].dimension;
    }
    element += sums[static_cast<size_t>(rank)];
  }
  routing.unique_splits[unique] = static_cast<int32_t>(entry);
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    const Bucket& bucket = buckets[static_cast<size_t>(range.item)];
    const size_t t = static_cast<size_t>(range.item) % num_tables;
    const int32_t rank = static_cast<int32_t>(static_cast<size_t>(range.item) / num_tables);
    const Group& group = groups[t];
    const int64_t shift = bucket.entry - group.splits[bucket.group];
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t u = bucket.group + i;
      routing.keys[bucket.unique + i] = send_orders[t].key(group.key(u), rank);
      routing.unique_splits[bucket.unique + i] = static_cast<int32_t>(group.splits[u] + shift);
      const int64_t row = bucket.element + i * tables[t].dimension;
      for (int64_t j = group.splits[u]; j < group.splits[u + 1]; ++j) {
        routing.order[j + shift] = static_cast<int32_t>(group.order[j]);
        routing.inverse[group.order[j]] = row;
      }
    }
  });
}

}  // namespace sok::cpu
