// SPDX-License-Identifier: Apache-2.0
// route_bags: the keys of a batch -> the same keys in send order, and which of each rank's keys belong to which bag.
#include <algorithm>
#include <utility>

#include "common/memory.h"
#include "cpu/contents.h"
#include "cpu/pool.h"
#include "cpu/stages.h"

namespace sok::cpu {
namespace {

constexpr int64_t kEntriesPerPiece = 1 << 15;

}  // namespace

void route_bags(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
                const BagParts& parts, const Routing& routing) {
  const size_t num_lookups = lookups.size();
  const int32_t num_ranks = tables.empty() ? 1 : tables.front().placement.num_ranks;
  Chunks pieces;  // bags of each lookup
  for (size_t i = 0; i < num_lookups; ++i) {
    const Lookup& lookup = lookups[i];
    check_split_ends(lookup);
    const int64_t keys_per_bag =
        std::max<int64_t>(1, ceil_div(lookup.keys.size, std::max<int64_t>(1, lookup.num_bags)));
    pieces.add(lookup.num_bags, std::max<int64_t>(1, kEntriesPerPiece / keys_per_bag));
  }
  // [piece, rank]: how many keys go there, then where the first of them goes.
  const Buffer<int64_t> places(context, pieces.count() * num_ranks);
  parallel_for(context, pieces.count(), [&](int64_t piece, int32_t) {
    const Chunks::Range range = pieces[piece];
    const size_t i = static_cast<size_t>(range.item);
    const Lookup& lookup = lookups[i];
    const Table& table = tables[static_cast<size_t>(lookup.table)];
    check_splits(lookup, range.begin, range.end);
    const int64_t first = first_of(lookup, range.begin), last = first_of(lookup, range.end);
    check_keys(table, lookup.keys, first, last);
    int64_t* const counts = places.data() + piece * num_ranks;
    std::fill(counts, counts + num_ranks, 0);
    for (int64_t k = first; k < last; ++k) ++counts[table.placement.home_of(integer_at(lookup.keys, k)).rank];
  });

  int64_t place = 0;
  std::vector<int64_t> begins(static_cast<size_t>(num_ranks) * num_lookups);  // of the keys of each rank and lookup
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    for (size_t i = 0; i < num_lookups; ++i) {
      const size_t at = static_cast<size_t>(rank) * num_lookups + i;
      begins[at] = place;
      for (int64_t piece = pieces.first(static_cast<int64_t>(i)); piece < pieces.first(static_cast<int64_t>(i) + 1);
           ++piece) {
        int64_t& count = places[piece * num_ranks + rank];
        place += std::exchange(count, place);
      }
      routing.counts.bag_keys(rank, lookups[i].number) = place - begins[at];
    }
  }
  std::vector<int64_t*> splits(static_cast<size_t>(num_ranks) * num_lookups);
  for (const BagPart& part : parts.parts()) {
    const size_t at = static_cast<size_t>(part.rank) * num_lookups + static_cast<size_t>(part.lookup);
    const int32_t number = lookups[static_cast<size_t>(part.lookup)].number;
    splits[at] = routing.bag_splits + part.first_split;
    splits[at][part.num_bags] = routing.counts.bag_keys(part.rank, number);
    routing.counts.bag_splits(part.rank, number) = part.num_bags + 1;
  }
  parallel_for(context, pieces.count(), [&](int64_t piece, int32_t) {
    const Chunks::Range range = pieces[piece];
    const size_t i = static_cast<size_t>(range.item);
    const Lookup& lookup = lookups[i];
    const Placement& placement = tables[static_cast<size_t>(lookup.table)].placement;
    int64_t* const next = places.data() + piece * num_ranks;
    for (int64_t bag = range.begin; bag < range.end; ++bag) {
      for (int32_t rank = 0; rank < num_ranks; ++rank) {
        const size_t at = static_cast<size_t>(rank) * num_lookups + i;
        if (splits[at] != nullptr) splits[at][bag] = next[rank] - begins[at];
      }
      const int64_t first = first_of(lookup, bag), last = first_of(lookup, bag + 1);
      for (int64_t k = first; k < last; ++k) {
        const int64_t key = integer_at(lookup.keys, k);
        const int64_t to = next[placement.home_of(key).rank]++;
        routing.bag_keys[to] = key;
      }
    }
  });
}

}  // namespace sok::cpu
