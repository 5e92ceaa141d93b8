// SPDX-License-Identifier: Apache-2.0
// initialize: initial rows. Compiled without fused multiply-adds (--fmad=false), as table/initial_value.h asks.
#include <type_traits>

#include "cuda/launch.h"
#include "cuda/report.cuh"
#include "cuda/stages.h"
#include "cuda/vector.cuh"
#include "table/initial_value.h"

namespace sok::cuda {
namespace {

template <typename T>
struct Rows {
  const void* keys;  // nullptr: first_key + i * key_stride
  bool keys_64bit;
  uint64_t first_key, key_stride;
  const int64_t* slots;   // nullptr: row i
  const uint8_t* mask;    // nullptr: all
  int64_t blocks_of_row;  // of four columns
  int64_t num_blocks;
  int64_t dimension;
  T* rows;
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    initialize_kernel(const __grid_constant__ InitialValue value, const __grid_constant__ Rows<T> p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.num_blocks) return;
  const int64_t entry = i / p.blocks_of_row;
  const int64_t block = i - entry * p.blocks_of_row;
  if (p.mask != nullptr && p.mask[entry] == 0) return;
  // Keys wrap around like the unsigned numbers that the counters are.
  const uint64_t key = p.keys != nullptr ? static_cast<uint64_t>(load_integer(p.keys, p.keys_64bit, entry))
                                         : p.first_key + static_cast<uint64_t>(entry) * p.key_stride;
  const int64_t row = p.slots != nullptr ? p.slots[entry] : entry;
  float columns[4];
  value.columns(key, static_cast<uint32_t>(block), columns);
  T* const to = p.rows + row * p.dimension + 4 * block;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (4 * block + c < p.dimension) to[c] = narrow<T>(columns[c]);
  }
}

}  // namespace

void initialize(const sok_context& context, const sok_initializer& initializer, const InitialRows& rows) {
  const Scope scope(context);
  const int64_t blocks_of_row = ceil_div(rows.dimension, 4);
  if (blocks_of_row == 0) return;
  const Integers& keys = rows.keys;
  // Launches of up to 2^30 thread blocks.
  const int64_t rows_at_once = std::max<int64_t>(1, (int64_t{1} << 30) * kThreads / blocks_of_row);
  for (int64_t first = 0; first < keys.size; first += rows_at_once) {
    const int64_t count = std::min(rows_at_once, keys.size - first);
    const auto* const from = static_cast<const char*>(keys.data);
    with_element(rows.rows.dtype, [&](auto* element) {
      using T = std::remove_pointer_t<decltype(element)>;
      const Rows<T> p = {
          from != nullptr ? from + first * (keys.is_64bit ? 8 : 4) : nullptr,
          keys.is_64bit,
          rows.first_key + static_cast<uint64_t>(first) * rows.key_stride,
          rows.key_stride,
          rows.slots != nullptr ? rows.slots + first : nullptr,
          rows.mask != nullptr ? rows.mask + first : nullptr,
          blocks_of_row,
          count * blocks_of_row,
          rows.dimension,
          static_cast<T*>(rows.slots != nullptr ? rows.rows.data : rows.rows.at(first * rows.dimension).data)};
      SOK_LAUNCH(initialize_kernel<T>, ceil_div(p.num_blocks, kThreads), scope.stream(), InitialValue(initializer), p);
    });
  }
}

}  // namespace sok::cuda
