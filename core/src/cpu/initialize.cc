// SPDX-License-Identifier: Apache-2.0
// initialize: initial rows; and rows as they are read where a table may not hold them. Compiled without fused
// multiply-adds.
#include <cstring>
#include <deque>

#include "common/memory.h"
#include "common/parallel.h"
#include "cpu/contents.h"
#include "cpu/row_writer.h"
#include "cpu/stages.h"
#include "table/hash_index.h"

namespace sok::cpu {

void initialize(const sok_context& context, const sok_initializer& initializer, const InitialRows& rows) {
  const RowWriter writer(context, initializer, rows.dimension, rows.rows.dtype);
  Chunks chunks;
  chunks.add(rows.keys.size, items_per_task(1 << 16, 4 * rows.dimension));
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t worker) {
    const Chunks::Range range = chunks[task];
    for (int64_t i = range.begin; i < range.end; ++i) {
      // Keys wrap around like the unsigned numbers that the counters are.
      const uint64_t key = rows.keys.data != nullptr ? static_cast<uint64_t>(integer_at(rows.keys, i))
                                                     : rows.first_key + static_cast<uint64_t>(i) * rows.key_stride;
      writer.write(key, rows.rows.at(i * rows.dimension).data, worker);
    }
  });
}

void initialize_new(const sok_context& context, const std::vector<NewRows>& columns) {
  std::deque<RowWriter> writers;
  Chunks chunks;
  for (const NewRows& column : columns) {
    writers.emplace_back(context, column.initializer, column.dimension, column.rows.dtype);
    chunks.add(column.keys.size, items_per_task(1 << 16, 4 * column.dimension));
  }
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t worker) {
    const Chunks::Range range = chunks[task];
    const NewRows& column = columns[static_cast<size_t>(range.item)];
    for (int64_t i = range.begin; i < range.end; ++i) {
      if (column.is_new[i] == 0) continue;
      if (column.since.since != nullptr) column.since.since[column.slots[i]] = column.since.generation;
      writers[static_cast<size_t>(range.item)].write(static_cast<uint64_t>(integer_at(column.keys, i)),
                                                     column.rows.at(column.slots[i] * column.dimension).data, worker);
    }
  });
}

void read_rows(const sok_context& context, const Columns& table, const sok_initializer& initializer,
               const Integers& keys, const int64_t* slots, void* rows) {
  const RowWriter writer(context, initializer, table.dimension, table.weight.dtype);
  const Floats to = {rows, table.weight.dtype};
  Chunks chunks;
  chunks.add(keys.size, items_per_task(1 << 16, 4 * table.dimension));
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t worker) {
    const Chunks::Range range = chunks[task];
    for (int64_t i = range.begin; i < range.end; ++i) {
      void* const row = to.at(i * table.dimension).data;
      if (slots[i] < 0) {
        writer.write(static_cast<uint64_t>(integer_at(keys, i)), row, worker);
      } else {
        std::memcpy(row, table.weight.at(slots[i] * table.dimension).data,
                    static_cast<size_t>(table.dimension * to.item_size()));
      }
    }
  });
}

void initialize_and_read(const sok_context& context, const NewRows& column, void* rows) {
  initialize_new(context, {column});
  Columns table;
  table.dimension = column.dimension;
  table.weight = column.rows;
  read_rows(context, table, column.initializer, column.keys, column.slots, rows);
}

void find_rows(const sok_context& context, const sok_hash_index& index, const Columns& table,
               const sok_initializer& initializer, const Integers& keys, void* rows) {
  const Buffer<int64_t> slots(context, keys.size);
  hash_find(context, {HashRequest{const_cast<sok_hash_index*>(&index), keys, slots.data(), nullptr}});
  read_rows(context, table, initializer, keys, slots.data(), rows);
}

}  // namespace sok::cpu
