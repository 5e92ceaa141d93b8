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
  const int64_t* keys;  // nullptr: first_key + i * key_stride
  uint64_t first_key, key_stride;
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
  const int64_t row = i / p.blocks_of_row;
  const int64_t block = i - row * p.blocks_of_row;
  // Keys wrap around like the unsigned numbers that the counters are.
  const uint64_t key =
      p.keys != nullptr ? static_cast<uint64_t>(p.keys[row]) : p.first_key + static_cast<uint64_t>(row) * p.key_stride;
  float columns[4];
  value.columns(key, static_cast<uint32_t>(block), columns);
  T* const to = p.rows + row * p.dimension + 4 * block;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (4 * block + c < p.dimension) to[c] = narrow<T>(columns[c]);
  }
}

}  // namespace

void initialize(const sok_context& context, const sok_initializer& initializer, const int64_t* keys, int64_t first_key,
                int64_t key_stride, int64_t num_rows, int64_t dimension, const Floats& rows) {
  const Scope scope(context);
  const int64_t blocks_of_row = ceil_div(dimension, 4);
  if (blocks_of_row == 0) return;
  // Launches of up to 2^30 thread blocks.
  const int64_t rows_at_once = std::max<int64_t>(1, (int64_t{1} << 30) * kThreads / blocks_of_row);
  for (int64_t first = 0; first < num_rows; first += rows_at_once) {
    const int64_t count = std::min(rows_at_once, num_rows - first);
    const uint64_t stride = static_cast<uint64_t>(key_stride);
    with_element(rows.dtype, [&](auto* element) {
      using T = std::remove_pointer_t<decltype(element)>;
      const Rows<T> p = {keys != nullptr ? keys + first : nullptr,
                         static_cast<uint64_t>(first_key) + static_cast<uint64_t>(first) * stride,
                         stride,
                         blocks_of_row,
                         count * blocks_of_row,
                         dimension,
                         static_cast<T*>(rows.at(first * dimension).data)};
      SOK_LAUNCH(initialize_kernel<T>, ceil_div(p.num_blocks, kThreads), scope.stream(), InitialValue(initializer), p);
    });
  }
}

}  // namespace sok::cuda
