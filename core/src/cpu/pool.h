// SPDX-License-Identifier: Apache-2.0
// What the stages that go through the bags of lookups share.
#ifndef SOK_CPU_POOL_H_
#define SOK_CPU_POOL_H_

#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "common/row_source.h"
#include "cpu/kernels/kernels.h"

namespace sok::cpu {

inline int64_t first_of(const Lookup& lookup, int64_t bag) {
  return lookup.row_splits != nullptr ? lookup.row_splits[bag] : bag;
}

// Tasks of about the same work: bags of each lookup.
Chunks chunk_bags(const sok_context& context, const std::vector<Lookup>& lookups);

// Calls f(begin, end, the vector that bag 0 would have) for bags [begin, end), or for those of each member among them.
template <typename F>
void for_members(const Vectors& vectors, int64_t begin, int64_t end, F&& f) {
  while (begin < end) {
    const int64_t last = vectors.batch == 0 ? end : std::min(end, (begin / vectors.batch + 1) * vectors.batch);
    f(begin, last, vectors.at(begin) - begin * vectors.stride);
    begin = last;
  }
}

// The rows of a source as kernels take them; those of entries [begin, end) are checked before.
IndexedRows checked_rows(const Lookup& lookup, const RowSource& source, int64_t begin, int64_t end);

// Of a lookup: the ends of its row splits, and the splits of bags [begin, end).
void check_split_ends(const Lookup& lookup);
void check_splits(const Lookup& lookup, int64_t begin, int64_t end);

}  // namespace sok::cpu

#endif  // SOK_CPU_POOL_H_
