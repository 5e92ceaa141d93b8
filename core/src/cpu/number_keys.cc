// SPDX-License-Identifier: Apache-2.0
// number_keys: keys of the members of stacks -> keys of the stacks.
#include <algorithm>

#include "cpu/contents.h"
#include "cpu/pool.h"
#include "cpu/stages.h"

namespace sok::cpu {

void number_keys(const sok_context& context, const std::vector<Lookup>& lookups) {
  constexpr int64_t kEntriesPerPiece = 1 << 15;
  Chunks pieces;  // bags of each lookup
  for (const Lookup& lookup : lookups) {
    check_split_ends(lookup);
    const int64_t keys_per_bag = lookup.keys.size / std::max<int64_t>(1, lookup.num_bags) + 1;
    pieces.add(lookup.num_bags, std::max<int64_t>(1, kEntriesPerPiece / keys_per_bag));
  }
  parallel_for(context, pieces.count(), [&](int64_t piece, int32_t) {
    const Chunks::Range bags = pieces[piece];
    const Lookup& lookup = lookups[static_cast<size_t>(bags.item)];
    check_splits(lookup, bags.begin, bags.end);
    for (int64_t bag = bags.begin; bag < bags.end;) {
      const int64_t number = bag / lookup.batch();
      const sok_member& member = lookup.members[number];
      const int64_t last = std::min(bags.end, (number + 1) * lookup.batch());
      const int64_t begin = first_of(lookup, bag), end = first_of(lookup, last);
      check_numbers({name_of(member), lookup.id.number, lookup.id.dimension}, Fault::kKey, lookup.keys, member.num_rows,
                    begin, end);
      for (int64_t i = begin; i < end; ++i) lookup.slots[i] = member.first_key + integer_at(lookup.keys, i);
      bag = last;
    }
  });
}

}  // namespace sok::cpu
