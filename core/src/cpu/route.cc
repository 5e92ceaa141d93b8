// SPDX-License-Identifier: Apache-2.0
// route: the keys of a batch -> unique keys in send order, and the way back. Keys are sorted by (owner, slot), which
// for a static table is a number below its number of rows, rounded up to whole rows of all ranks.
#include <algorithm>

#include "cpu/contents.h"
#include "cpu/group.h"
#include "cpu/pool.h"
#include "cpu/stages.h"

namespace sok::cpu {
namespace {

constexpr int64_t kEntriesPerPiece = 1 << 15;

// Key <-> (owner, slot) as one number that sorts in send order.
class SendOrder {
 public:
  explicit SendOrder(const Placement& placement)
      : placement_(placement),
        rows_per_rank_(static_cast<uint64_t>(placement.local_rows(std::max(0, placement.owner)))) {}

  uint64_t limit() const {
    return placement_.owner >= 0 ? rows_per_rank_ : rows_per_rank_ * static_cast<uint64_t>(placement_.num_ranks);
  }
  uint64_t number(int64_t key) const {
    const Home home = placement_.home_of(key);
    return begin(home.rank) + static_cast<uint64_t>(home.slot);
  }
  // Of a number that belongs to `rank`.
  int64_t key(uint64_t number, int32_t rank) const {
    return placement_.key_of({rank, static_cast<int64_t>(number - begin(rank))});
  }
  // Numbers of ranks below `rank` are below this.
  uint64_t begin(int32_t rank) const {
    if (placement_.owner >= 0) return rank <= placement_.owner ? 0 : limit();
    return static_cast<uint64_t>(rank) * rows_per_rank_;
  }

 private:
  Placement placement_;
  uint64_t rows_per_rank_;  // of the rank that has the most
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
           const Routing& routing) {
  const size_t num_tables = tables.size();
  const int32_t num_ranks = tables.empty() ? 1 : tables.front().placement.num_ranks;
  std::vector<TablePlan> plans(num_tables);
  std::vector<SendOrder> send_orders;
  std::vector<GroupJob> jobs(num_tables);
  for (size_t t = 0; t < num_tables; ++t) {
    send_orders.emplace_back(tables[t].placement);
    jobs[t].limit = send_orders[t].limit();
  }
  for (size_t i = 0; i < lookups.size(); ++i) {
    const Lookup& lookup = lookups[i];
    const size_t t = static_cast<size_t>(lookup.table);
    check_split_ends(lookup, i);
    check_splits(lookup, {static_cast<int64_t>(i), 0, lookup.num_bags});
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
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    for (size_t t = 0; t < num_tables; ++t) {
      const Group& group = groups[t];
      const auto lower_bound = [&](uint64_t number) {
        int64_t low = 0, high = group.count;
        while (low < high) {
          const int64_t middle = low + (high - low) / 2;
          group.key(middle) < number ? low = middle + 1 : high = middle;
        }
        return low;
      };
      const int64_t begin = lower_bound(send_orders[t].begin(rank));
      const int64_t end = rank + 1 == num_ranks ? group.count : lower_bound(send_orders[t].begin(rank + 1));
      const int64_t count = end - begin;
      routing.counts[static_cast<size_t>(rank) * num_tables + t] = count;
      buckets.push_back({begin, unique, entry, element});
      chunks.add(count, 1 << 13);
      unique += count;
      entry += count == 0 ? 0 : group.splits[end] - group.splits[begin];
      element += count * tables[t].dimension;
    }
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
