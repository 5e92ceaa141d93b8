// SPDX-License-Identifier: Apache-2.0
// initialize: initial rows, of all keys of a call or of the new ones. Compiled without fused multiply-adds
// (--fmad=false), as table/initial_value.h asks.
#include <type_traits>

#include "cuda/initial_row.cuh"
#include "cuda/launch.h"
#include "cuda/placement.cuh"
#include "cuda/stages.h"
#include "cuda/upload.h"

namespace sok::cuda {
namespace {

template <typename T>
struct Rows {
  const void* keys;  // nullptr: first_key + i * key_stride
  bool keys_64bit;
  uint64_t first_key, key_stride;
  int64_t blocks_of_row;  // of four columns
  int64_t num_blocks;
  int64_t dimension;
  bool in_vectors;
  T* rows;
};

template <typename T, bool kNormal>
__global__ void __launch_bounds__(kThreads)
    initialize_kernel(const __grid_constant__ InitialValue value, const __grid_constant__ Rows<T> p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.num_blocks) return;
  const int64_t entry = i / p.blocks_of_row;
  const int64_t block = i - entry * p.blocks_of_row;
  // Keys wrap around like the unsigned numbers that the counters are.
  const uint64_t key = p.keys != nullptr ? static_cast<uint64_t>(load_integer(p.keys, p.keys_64bit, entry))
                                         : p.first_key + static_cast<uint64_t>(entry) * p.key_stride;
  write_block<kNormal>(value, key, block, p.dimension, p.in_vectors, p.rows + entry * p.dimension);
}

constexpr int kKeysOfBlock = 2 * kThreads;

struct NewItem {  // a column
  InitialValue value;
  const void* keys;
  const int64_t* slots;
  const uint8_t* is_new;
  void* rows;
  int64_t num_keys;
  int64_t first_block;  // of kKeysOfBlock keys each
  Generations since;
  uint32_t dimension;
  int log_lanes;  // 2^log_lanes threads share a row
  sok_dtype dtype;
  bool keys_64bit, in_vectors;
};

// In most calls few keys are new or none: a block looks for them first, and then all its threads write their rows.
template <bool kNormal>
__global__ void __launch_bounds__(kThreads, kNormal ? 5 : 6)
    initialize_new_kernel(const NewItem* items, uint32_t num_items) {
  __shared__ uint64_t keys[kKeysOfBlock];
  __shared__ int64_t slots[kKeysOfBlock];
  __shared__ uint32_t count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  const NewItem& item =
      items[last_at_or_before(num_items, blockIdx.x, [&](uint32_t at) { return __ldg(&items[at].first_block); })];
  const int64_t first_key = (blockIdx.x - item.first_block) * kKeysOfBlock;
  bool are_new[kKeysOfBlock / kThreads];
#pragma unroll
  for (int k = 0; k < kKeysOfBlock / kThreads; ++k) {
    const int64_t i = first_key + k * kThreads + threadIdx.x;
    are_new[k] = i < item.num_keys && item.is_new[i] == 1;
  }
#pragma unroll
  for (int k = 0; k < kKeysOfBlock / kThreads; ++k) {
    if (!are_new[k]) continue;
    const int64_t i = first_key + k * kThreads + threadIdx.x;
    const uint32_t at = atomicAdd(&count, 1u);
    keys[at] = static_cast<uint64_t>(load_integer(item.keys, item.keys_64bit, i));
    slots[at] = item.slots[i];
    if (item.since.since != nullptr) item.since.since[slots[at]] = item.since.generation;
  }
  __syncthreads();
  if (count == 0) return;
  const uint32_t dimension = item.dimension, blocks_of_row = dimension / 4 + (dimension % 4 != 0 ? 1 : 0);
  const uint32_t lanes = 1u << item.log_lanes;
  const InitialValue value = item.value;
  for (uint32_t entry = threadIdx.x >> item.log_lanes; entry < count; entry += kThreads >> item.log_lanes) {
    const int64_t first = slots[entry] * dimension;
    for (uint32_t block = threadIdx.x & (lanes - 1); block < blocks_of_row; block += lanes) {
      const auto write = [&](auto* rows) {
        write_block<kNormal>(value, keys[entry], block, dimension, item.in_vectors, rows + first);
      };
      if (item.dtype == SOK_FLOAT32) {
        write(static_cast<float*>(item.rows));
      } else if (item.dtype == SOK_FLOAT16) {
        write(static_cast<__half*>(item.rows));
      } else {
        write(static_cast<__nv_bfloat16*>(item.rows));
      }
    }
  }
}

}  // namespace

void initialize(const sok_context& context, const sok_initializer& initializer, const InitialRows& rows) {
  const Scope scope(context);
  const InitialValue value(initializer);
  const int64_t blocks_of_row = ceil_div(rows.dimension, 4);
  if (blocks_of_row == 0) return;
  const Integers& keys = rows.keys;
  // Launches of up to 2^30 thread blocks.
  const int64_t rows_at_once = std::max<int64_t>(1, (int64_t{1} << 30) * kThreads / blocks_of_row);
  for (int64_t first = 0; first < keys.size; first += rows_at_once) {
    const int64_t count = std::min(rows_at_once, keys.size - first);
    const auto* const from = static_cast<const char*>(keys.data);
    with_kernel(rows.rows.dtype, value.is_normal(), [&](auto* element, auto normal) {
      using T = std::remove_pointer_t<decltype(element)>;
      const Rows<T> p = {from != nullptr ? from + first * (keys.is_64bit ? 8 : 4) : nullptr,
                         keys.is_64bit,
                         rows.first_key + static_cast<uint64_t>(first) * rows.key_stride,
                         rows.key_stride,
                         blocks_of_row,
                         count * blocks_of_row,
                         rows.dimension,
                         moves_in_vectors(rows.dimension, rows.rows.data),
                         static_cast<T*>(rows.rows.at(first * rows.dimension).data)};
      SOK_LAUNCH((initialize_kernel<T, decltype(normal)::value>), ceil_div(p.num_blocks, kThreads), scope.stream(),
                 value, p);
    });
  }
}

void initialize_new(const sok_context& context, const std::vector<NewRows>& columns) {
  const Scope scope(context);
  std::vector<NewItem> items;
  int64_t blocks = 0;
  bool is_normal = false;
  for (const NewRows& column : columns) {
    if (column.keys.size == 0) continue;
    items.push_back({InitialValue(column.initializer), column.keys.data, column.slots, column.is_new, column.rows.data,
                     column.keys.size, blocks, column.since, static_cast<uint32_t>(column.dimension),
                     log_lanes_of(column.dimension, 4), column.rows.dtype, column.keys.is_64bit,
                     moves_in_vectors(column.dimension, column.rows.data)});
    blocks += ceil_div(column.keys.size, kKeysOfBlock);
    is_normal = is_normal || items.back().value.is_normal();
  }
  if (items.empty()) return;
  Upload upload;
  const size_t place = upload.add(items);
  upload.send(scope);
  const auto kernel = is_normal ? &initialize_new_kernel<true> : &initialize_new_kernel<false>;
  SOK_LAUNCH(kernel, blocks, scope.stream(), upload.at<NewItem>(place), static_cast<uint32_t>(items.size()));
}

}  // namespace sok::cuda
