// SPDX-License-Identifier: Apache-2.0
// read_rows, find_rows, initialize_and_read: rows as they are read where a table does not hold all of them, or just got
// them. Compiled without fused multiply-adds (--fmad=false), as table/initial_value.h asks.
#include "cuda/hash_probe.cuh"
#include "cuda/initial_row.cuh"
#include "cuda/placement.cuh"
#include "cuda/stages.h"
#include "table/hash_index.h"

namespace sok::cuda {
namespace {

// Where the rows of keys are.
struct Places {
  const int64_t* slots;  // -1: the initial row of the key; nullptr: they are found in `space`
  HashSpace space;
  // Of initialize_and_read: not 0 where the key's row is its initial one, 1 where that goes to the table too.
  const uint8_t* is_new;
  Generations since;
};

template <typename T>
struct Reading {
  Places places;
  const void* keys;
  T* table;
  T* rows;
  int64_t num_rows, dimension;
  int log_lanes;  // 2^log_lanes threads share a row
  bool keys_64bit;
  bool in_vectors;  // four elements may be moved at once
};

// A thread has pieces of so many rows on their way.
constexpr uint32_t kRowsAtOnce = 4;

// A warp reads 32 rows, and makes the initial ones among them while the first of the others are on their way.
template <typename T, bool kNormal, bool kHasNew>
__global__ void __launch_bounds__(kThreads, 4)
    read_rows_kernel(const __grid_constant__ InitialValue value, const __grid_constant__ Reading<T> p) {
  // Of each warp: the slots of the rows that are read, behind them the keys of those that are made; and which ones.
  __shared__ int64_t slots_and_keys[kThreads / kWarp][kWarp];
  __shared__ int64_t new_slots[kHasNew ? kThreads / kWarp : 1][kWarp];  // where else rows go that are made, or -1
  __shared__ uint8_t numbers[kThreads / kWarp][kWarp];
  const uint32_t warp = threadIdx.x / kWarp, lane_of_warp = threadIdx.x % kWarp;
  const int64_t first_of_warp = static_cast<int64_t>(blockIdx.x) * kThreads + warp * kWarp;
  const int64_t own = first_of_warp + lane_of_warp;
  const bool is_there = own < p.num_rows;
  const int64_t key = is_there ? load_integer(p.keys, p.keys_64bit, own) : 0;
  int64_t slot = -1;
  if (p.places.slots == nullptr) {
    slot = find_slots(p.places.space, key, is_there);
  } else if (is_there) {
    slot = p.places.slots[own];
  }
  bool is_read = slot >= 0, is_first = false;
  if constexpr (kHasNew) {
    const uint8_t is_new = is_there ? p.places.is_new[own] : 0;
    is_read = is_read && is_new == 0;
    is_first = is_new == 1;
    if (is_first && p.places.since.since != nullptr) p.places.since.since[slot] = p.places.since.generation;
  }
  const unsigned read = __ballot_sync(kWholeWarp, is_read);
  const unsigned made = __ballot_sync(kWholeWarp, is_there && !is_read);
  const unsigned before = (1u << lane_of_warp) - 1u;
  const uint32_t num_read = __popc(read), num_rows = num_read + __popc(made);
  if (is_there) {
    const uint32_t at = is_read ? __popc(read & before) : num_read + __popc(made & before);
    slots_and_keys[warp][at] = is_read ? slot : key;
    if constexpr (kHasNew) new_slots[warp][at] = is_first ? slot : -1;
    numbers[warp][at] = static_cast<uint8_t>(lane_of_warp);
  }
  __syncwarp();

  const uint32_t lanes = 1u << p.log_lanes, lane = lane_of_warp & (lanes - 1);
  const uint32_t group = lane_of_warp >> p.log_lanes, num_groups = kWarp >> p.log_lanes;
  T* const rows = p.rows + first_of_warp * p.dimension;
  const auto make = [&] {
    for (uint32_t at = num_read + group; at < num_rows; at += num_groups) {
      const auto its_key = static_cast<uint64_t>(slots_and_keys[warp][at]);
      T* const row = rows + numbers[warp][at] * p.dimension;
      T* in_table = nullptr;
      if constexpr (kHasNew) {
        if (new_slots[warp][at] >= 0) in_table = p.table + new_slots[warp][at] * p.dimension;
      }
      for (int64_t block = lane; 4 * block < p.dimension; block += lanes)
        write_block<kNormal>(value, its_key, block, p.dimension, p.in_vectors, row, in_table);
    }
  };
  if (!p.in_vectors) {
    make();
    for (uint32_t at = group; at < num_read; at += num_groups) {
      const T* const from = p.table + slots_and_keys[warp][at] * p.dimension;
      for (int64_t c = lane; c < p.dimension; c += lanes) rows[numbers[warp][at] * p.dimension + c] = from[c];
    }
    return;
  }
  Piece<T, 4> pieces[kRowsAtOnce];
  const auto load = [&](uint32_t first, int64_t c) {
#pragma unroll
    for (uint32_t k = 0; k < kRowsAtOnce; ++k) {
      const uint32_t at = first + k * num_groups;
      if (at < num_read && c < p.dimension) {
        pieces[k] = Piece<T, 4>::load(p.table + slots_and_keys[warp][at] * p.dimension + c);
      }
    }
  };
  const auto store = [&](uint32_t first, int64_t c) {
#pragma unroll
    for (uint32_t k = 0; k < kRowsAtOnce; ++k) {
      const uint32_t at = first + k * num_groups;
      if (at < num_read && c < p.dimension) pieces[k].store(rows + numbers[warp][at] * p.dimension + c);
    }
  };
  load(group, 4 * lane);
  make();
  store(group, 4 * lane);
  for (int64_t c = 4 * lane; c < p.dimension; c += 4 * lanes) {
    for (uint32_t first = group + (c < 4 * lanes ? kRowsAtOnce * num_groups : 0); first < num_read;
         first += kRowsAtOnce * num_groups) {
      load(first, c);
      store(first, c);
    }
  }
}

template <bool kHasNew>
void read(const sok_context& context, const Places& places, const sok_initializer& initializer, const Integers& keys,
          const Floats& table, int64_t dimension, void* rows) {
  const Scope scope(context);
  const InitialValue value(initializer);
  with_kernel(table.dtype, value.is_normal(), [&](auto* element, auto normal) {
    using T = std::remove_pointer_t<decltype(element)>;
    const Reading<T> p = {places,
                          keys.data,
                          static_cast<T*>(table.data),
                          static_cast<T*>(rows),
                          keys.size,
                          dimension,
                          log_lanes_of(dimension, 4),
                          keys.is_64bit,
                          moves_in_vectors(dimension, table.data) && is_aligned(rows)};
    SOK_LAUNCH((read_rows_kernel<T, decltype(normal)::value, kHasNew>), ceil_div(keys.size, kThreads), scope.stream(),
               value, p);
  });
}

}  // namespace

void read_rows(const sok_context& context, const Columns& table, const sok_initializer& initializer,
               const Integers& keys, const int64_t* slots, void* rows) {
  read<false>(context, {slots, {}, nullptr, {}}, initializer, keys, table.weight, table.dimension, rows);
}

void find_rows(const sok_context& context, const sok_hash_index& index, const Columns& table,
               const sok_initializer& initializer, const Integers& keys, void* rows) {
  read<false>(context, {nullptr, index.space(), nullptr, {}}, initializer, keys, table.weight, table.dimension, rows);
}

void initialize_and_read(const sok_context& context, const NewRows& column, void* rows) {
  read<true>(context, {column.slots, {}, column.is_new, column.since}, column.initializer, column.keys, column.rows,
             column.dimension, rows);
}

}  // namespace sok::cuda
