// SPDX-License-Identifier: Apache-2.0
// The loop over bags that combine and gather_combine share.
#ifndef SOK_CPU_POOL_H_
#define SOK_CPU_POOL_H_

#include <vector>

#include "common/call.h"
#include "common/parallel.h"
#include "cpu/kernels/kernels.h"

namespace sok::cpu {

inline int64_t first_of(const Lookup& lookup, int64_t bag) {
  return lookup.row_splits != nullptr ? lookup.row_splits[bag] : bag;
}

// Tasks of about the same work: bags of each lookup.
Chunks chunk_bags(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups);

// check(lookup number, begin, end) sees a range of a lookup's entries before its rows are read; source(lookup number)
// says where those rows are.
template <typename Source, typename Check>
void pool_lookups(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
                  Source&& source, Check&& check);

}  // namespace sok::cpu

#include "cpu/contents.h"

namespace sok::cpu {

template <typename Source, typename Check>
void pool_lookups(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
                  Source&& source, Check&& check) {
  for (size_t i = 0; i < lookups.size(); ++i) {
    const Lookup& lookup = lookups[i];
    check_split_ends(
        lookup.row_splits, lookup.num_bags, lookup.keys.size,
        {"lookups", static_cast<int64_t>(i), "row_splits", tables[static_cast<size_t>(lookup.table)].name});
  }
  const Chunks chunks = chunk_bags(context, tables, lookups);
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    const size_t i = static_cast<size_t>(range.item);
    const Lookup& lookup = lookups[i];
    const Table& table = tables[static_cast<size_t>(lookup.table)];
    check_splits(lookup.row_splits, range.begin, range.end, lookup.keys.size,
                 {"lookups", range.item, "row_splits", table.name});
    check(i, first_of(lookup, range.begin), first_of(lookup, range.end));
    const PoolTask pool = {source(i),       lookup.row_splits, lookup.weights, lookup.output.data, lookup.output.stride,
                           table.dimension, lookup.combiner};
    kernels().pool(pool, range.begin, range.end);
  });
}

// Of combine: rows in the flat buffer of exchanged rows, by the offsets that route gave.
class ExchangedRows {
 public:
  ExchangedRows(const std::vector<Table>& tables, const std::vector<Lookup>& lookups, const int64_t* inverse,
                const Floats& rows, int64_t num_elements)
      : tables_(tables), lookups_(lookups), inverse_(inverse), rows_(rows), num_elements_(num_elements) {}

  IndexedRows source(size_t i) const { return {rows_.data, rows_.dtype, 1, inverse_ + lookups_[i].first_entry, true}; }
  void check(size_t i, int64_t begin, int64_t end) const;

 private:
  const std::vector<Table>& tables_;
  const std::vector<Lookup>& lookups_;
  const int64_t* inverse_;
  const Floats rows_;
  int64_t num_elements_;
};

// Of gather_combine: rows of static tables by key.
inline IndexedRows table_rows(const Table& table, const Lookup& lookup) {
  return {table.weight.data, table.weight.dtype, table.dimension, lookup.keys.data, lookup.keys.is_64bit};
}

}  // namespace sok::cpu

#endif  // SOK_CPU_POOL_H_
