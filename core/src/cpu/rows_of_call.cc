// SPDX-License-Identifier: Apache-2.0
// Compiled without fused multiply-adds.
#include "cpu/rows_of_call.h"

#include <algorithm>
#include <optional>

#include "common/parallel.h"
#include "cpu/contents.h"
#include "cpu/row_writer.h"
#include "table/dynamic_table.h"
#include "table/index.h"

namespace sok::cpu {
namespace {

constexpr int64_t kKeysOfTask = 1 << 13;

// Of slots [begin, end), which the index of a table gave.
int64_t count_lacking(const Columns& table, const int64_t* slots, int64_t begin, int64_t end) {
  int64_t lacking = 0;
  for (int64_t i = begin; i < end; ++i) {
    lacking += slots[i] < 0;
    if (slots[i] >= table.num_slots || (slots[i] < 0 && table.owner == nullptr)) {
      throw_found({Fault::kSlot, table.number, slots[i], table.num_slots}, table.name);
    }
  }
  return lacking;
}

}  // namespace

RowsOfCall::RowsOfCall(const sok_context& context, const std::vector<Columns>& tables,
                       const std::vector<Lookup>& lookups)
    : sources_(rows_of_tables(tables, lookups)) {
  const std::vector<const sok_index*> indices = check_indices(context, tables);
  if (!any_index(indices)) return;
  std::vector<Lookup> asked;
  std::vector<RowSource*> sources;
  int64_t num_keys = 0;
  for (size_t i = 0; i < lookups.size(); ++i) {
    if (indices[static_cast<size_t>(lookups[i].table)] == nullptr) continue;
    asked.push_back(lookups[i]);
    sources.push_back(&sources_[i]);
    num_keys += lookups[i].keys.size;
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
  const auto table_of = [&](int64_t item) -> const Columns& {
    return tables[static_cast<size_t>(asked[static_cast<size_t>(item)].table)];
  };
  const auto bytes_of_row = [](const Columns& table) { return table.dimension * table.weight.item_size(); };

  std::vector<int64_t> first(static_cast<size_t>(chunks.count()));  // byte of each task in initial_
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    const int64_t* const slots = asked[static_cast<size_t>(range.item)].slots;
    first[static_cast<size_t>(task)] = count_lacking(table_of(range.item), slots, range.begin, range.end);
  });
  int64_t bytes = 0;
  std::vector<std::optional<RowWriter>> writers(asked.size());
  for (size_t i = 0; i < asked.size(); ++i) {
    const Columns& table = table_of(static_cast<int64_t>(i));
    const int64_t begin = bytes;
    for (int64_t task = chunks.first(i); task < chunks.first(i + 1); ++task) {
      int64_t& of_task = first[static_cast<size_t>(task)];
      bytes += std::exchange(of_task, bytes) * bytes_of_row(table);
    }
    if (bytes == begin) continue;
    writers[i].emplace(context, table.owner->initializer(), table.dimension, table.weight.dtype);
    bytes = (bytes + 63) / 64 * 64;
  }
  initial_ = Buffer<char>(context, bytes);

  // Numbers of the rows are elements from whichever is lower, the table's memory or this call's.
  for (size_t i = 0; i < asked.size(); ++i) {
    const Columns& table = table_of(static_cast<int64_t>(i));
    auto* const rows = static_cast<char*>(table.weight.data);
    char* low = rows;
    char* high = rows + table.num_slots * bytes_of_row(table);
    if (writers[i].has_value()) {
      low = std::min(low, initial_.data());
      high = std::max(high, initial_.data() + bytes);
    }
    const int64_t limit = (high - low) / table.weight.item_size() - table.dimension + 1;
    *sources[i] = {{low, table.weight.dtype}, {asked[i].slots, asked[i].keys.size}, 1, 0, limit, Fault::kOffset};
  }
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t worker) {
    const Chunks::Range range = chunks[task];
    const auto item = static_cast<size_t>(range.item);
    const Columns& table = table_of(range.item);
    const auto* const low = static_cast<const char*>(sources[item]->rows.data);
    const auto elements_to = [&](const void* row) {
      return (static_cast<const char*>(row) - low) / table.weight.item_size();
    };
    const int64_t held = elements_to(table.weight.data);
    char* row = initial_.data() + first[static_cast<size_t>(task)];
    int64_t* const numbers = asked[item].slots;
    for (int64_t i = range.begin; i < range.end; ++i) {
      if (numbers[i] >= 0) {
        numbers[i] = held + numbers[i] * table.dimension;
        continue;
      }
      writers[item]->write(static_cast<uint64_t>(integer_at(asked[item].keys, i)), row, worker);
      numbers[i] = elements_to(row);
      row += bytes_of_row(table);
    }
  });
}

}  // namespace sok::cpu
