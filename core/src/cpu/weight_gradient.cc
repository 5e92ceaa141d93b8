// SPDX-License-Identifier: Apache-2.0
// weight_gradient: d loss / d weights of the lookups.
#include <cstring>

#include "cpu/pool.h"
#include "cpu/stages.h"

namespace sok::cpu {

void weight_gradient(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
                     const std::vector<Vectors>& output_gradients, const int64_t* inverse, const Floats& rows,
                     int64_t num_elements, const std::vector<float*>& weight_gradients) {
  const ExchangedRows exchanged(tables, lookups, inverse, rows, num_elements);
  for (size_t i = 0; i < lookups.size(); ++i) {
    const Table& table = tables[static_cast<size_t>(lookups[i].table)];
    check_split_ends(lookups[i].row_splits, lookups[i].num_bags, lookups[i].keys.size,
                     {"lookups", static_cast<int64_t>(i), "row_splits", table.name});
    SOK_CHECK(weight_gradients[i] == nullptr || lookups[i].weights != nullptr, "table '", table.name,
              "': weight_gradients[", i, "] is wanted but the lookup has no weights");
  }
  const Chunks chunks = chunk_bags(context, tables, lookups);
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    const size_t i = static_cast<size_t>(range.item);
    const Lookup& lookup = lookups[i];
    if (weight_gradients[i] == nullptr) return;
    const Table& table = tables[static_cast<size_t>(lookup.table)];
    check_splits(lookup.row_splits, range.begin, range.end, lookup.keys.size,
                 {"lookups", range.item, "row_splits", table.name});
    const int64_t begin = first_of(lookup, range.begin), end = first_of(lookup, range.end);
    if (output_gradients[i].data == nullptr) {
      if (begin < end) std::memset(weight_gradients[i] + begin, 0, static_cast<size_t>(end - begin) * sizeof(float));
      return;
    }
    if (inverse != nullptr) {
      exchanged.check(i, begin, end);
    } else {
      check_keys(table, lookup.keys, begin, end);
    }
    const WeightGradientTask work = {inverse != nullptr ? exchanged.source(i) : table_rows(table, lookup),
                                     lookup.row_splits,
                                     lookup.weights,
                                     output_gradients[i].data,
                                     output_gradients[i].stride,
                                     weight_gradients[i],
                                     table.dimension,
                                     lookup.combiner};
    kernels().weight_gradient(work, range.begin, range.end);
  });
}

}  // namespace sok::cpu
