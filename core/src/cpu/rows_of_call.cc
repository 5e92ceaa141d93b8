// SPDX-License-Identifier: Apache-2.0
// Compiled without fused multiply-adds.
#include "cpu/rows_of_call.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "common/parallel.h"
#include "cpu/contents.h"
#include "cpu/row_writer.h"
#include "table/dynamic_table.h"
#include "table/index.h"

namespace sok::cpu {

RowsOfCall::RowsOfCall(const sok_context& context, const std::vector<Columns>& tables,
                       const std::vector<Lookup>& lookups)
    : sources_(rows_of_tables(tables, lookups)) {
  constexpr int64_t kKeysOfTask = 1 << 13;
  const std::vector<const sok_index*> indices = check_indices(context, tables);
  if (!any_index(indices)) return;
  const auto table_of = [&](const Lookup& lookup) -> const Columns& {
    return tables[static_cast<size_t>(lookup.table)];
  };
  const auto bytes_of_row = [](const Columns& table) { return table.dimension * table.weight.item_size(); };

  std::vector<Lookup> asked;
  int64_t num_keys = 0;
  for (const Lookup& lookup : lookups) {
    if (indices[static_cast<size_t>(lookup.table)] == nullptr) continue;
    asked.push_back(lookup);
    num_keys += lookup.keys.size;
  }
  numbers_ = Buffer<int64_t>(context, num_keys);
  Chunks chunks;
  num_keys = 0;
  for (Lookup& lookup : asked) {
    lookup.slots = numbers_.data() + num_keys;
    num_keys += lookup.keys.size;
    chunks.add(lookup.keys.size, kKeysOfTask);
  }
  ask_indices(context, indices, asked, 0);
  std::vector<int64_t> lacking(static_cast<size_t>(chunks.count()));  // keys of each task; then initial rows before it
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    const int64_t* const slots = asked[static_cast<size_t>(range.item)].slots;
    lacking[static_cast<size_t>(task)] =
        std::count_if(slots + range.begin, slots + range.end, [](int64_t slot) { return slot < 0; });
  });

  std::vector<std::optional<RowWriter>> writers(asked.size());
  initial_.resize(asked.size());
  bool any_lacks = false;
  for (size_t i = 0; i < asked.size(); ++i) {
    const Columns& table = table_of(asked[i]);
    RowSource& source = sources_[static_cast<size_t>(asked[i].number)];
    source.numbers = {asked[i].slots, asked[i].keys.size};
    source.fault = Fault::kSlot;
    const auto item = static_cast<int64_t>(i);
    int64_t rows = 0;
    for (int64_t task = chunks.first(item); task < chunks.first(item + 1); ++task) {
      int64_t& of_task = lacking[static_cast<size_t>(task)];
      rows += std::exchange(of_task, rows);
    }
    if (rows == 0 || table.owner == nullptr) continue;  // the stage refuses slots below 0
    any_lacks = true;
    writers[i].emplace(context, table.owner->initializer(), table.dimension, table.weight.dtype);
    initial_[i] = Buffer<char>(context, rows * bytes_of_row(table));
    // Numbers become elements from whichever is lower, the table's rows or the initial ones.
    char* const held = static_cast<char*>(table.weight.data);
    char* const low = std::min(held, initial_[i].data());
    char* const high = std::max(held + table.num_slots * bytes_of_row(table), initial_[i].data() + initial_[i].size());
    const int64_t limit = (high - low) / table.weight.item_size() - table.dimension + 1;
    source = {{low, table.weight.dtype}, source.numbers, 1, 0, limit, Fault::kOffset};
  }
  if (!any_lacks) return;
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t worker) {
    const Chunks::Range range = chunks[task];
    const auto item = static_cast<size_t>(range.item);
    if (!writers[item].has_value()) return;
    const Lookup& lookup = asked[item];
    const Columns& table = table_of(lookup);
    const auto* const low = static_cast<const char*>(sources_[static_cast<size_t>(lookup.number)].rows.data);
    const auto number_of = [&](const void* row) {
      return (static_cast<const char*>(row) - low) / table.weight.item_size();
    };
    const int64_t held = number_of(table.weight.data);
    char* row = initial_[item].data() + lacking[static_cast<size_t>(task)] * bytes_of_row(table);
    for (int64_t i = range.begin; i < range.end; ++i) {
      int64_t& number = lookup.slots[i];
      if (number < 0) {
        writers[item]->write(static_cast<uint64_t>(integer_at(lookup.keys, i)), row, worker);
        number = number_of(row);
        row += bytes_of_row(table);
        continue;
      }
      if (number >= table.num_slots) throw_found({Fault::kSlot, table.number, number, table.num_slots}, table.name);
      number = held + number * table.dimension;
    }
  });
}

}  // namespace sok::cpu
