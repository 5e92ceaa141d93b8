// SPDX-License-Identifier: Apache-2.0
// The kernel of segments.h. A rule says what a finished sum does to a row.
#ifndef SOK_CUDA_SEGMENT_KERNEL_CUH_
#define SOK_CUDA_SEGMENT_KERNEL_CUH_

#include "cuda/launch.h"
#include "cuda/segments.h"
#include "cuda/vector.cuh"

namespace sok::cuda {

__device__ __forceinline__ void load_four(const uint32_t* p, uint32_t (&to)[4]) {
  const uint4 x = __ldg(reinterpret_cast<const uint4*>(p));
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}
__device__ __forceinline__ void load_four(const uint64_t* p, uint64_t (&to)[4]) {
  const ulonglong2 x = __ldg(reinterpret_cast<const ulonglong2*>(p));
  const ulonglong2 y = __ldg(reinterpret_cast<const ulonglong2*>(p) + 1);
  to[0] = x.x, to[1] = x.y, to[2] = y.x, to[3] = y.y;
}

// The entries that one group of threads looks at. A run that begins in the chunk and ends early in the next one is
// finished here: the group reads on (`follows`), and the next one leaves those entries out (`skips`). Longer runs leave
// sums behind.
template <typename Key>
struct Chunk {
  const Key* keys;
  const uint32_t* values;
  Key padding;
  Key first, last;
  Key after;     // the first key of the next chunk, or padding
  bool opens;    // the first run began in an earlier chunk
  bool skips;    // and is finished there
  bool follows;  // the last run is finished here
  bool goes_on;  // the last run goes on, and is not

  __device__ __forceinline__ Chunk(const SegmentLevel<Key>& p, const SegmentSpan& span, uint32_t number,
                                   Key padding_key)
      : padding(padding_key) {
    const int64_t begin = static_cast<int64_t>(span.first_entry) + static_cast<int64_t>(number) * kChunk;
    keys = p.keys + begin;
    values = p.values + begin;
    first = keys[0];
    last = keys[kChunk - 1];
    after = number + 1 < span.num_chunks ? keys[kChunk] : padding;
    const Key before = number > 0 ? keys[-1] : padding;
    const Key earlier = number > 1 ? keys[-kChunk - 1] : padding;
    opens = first == before && first != padding;
    skips = opens && earlier != first && keys[kFollowed] != first;
    const bool crosses = last == after && last != padding;
    follows = crosses && !(opens && first == last) && keys[kChunk + kFollowed] != last;
    goes_on = crosses && !follows;
  }
};

// Calls finish(key, position, sum, row) for each run that the chunk finishes, `row` being what Policy::load read. The
// sum of an open run that ends in the chunk goes to `head`; that of a run that goes on is in `sum` afterwards. `open`:
// no run has ended, and the first one began earlier.
template <typename Policy, int kWidth, bool kPlain, typename Key, typename Finish>
__device__ __forceinline__ void walk_chunk(const SegmentLevel<Key>& p, const SegmentTable& t, const Chunk<Key>& chunk,
                                           uint32_t column, bool active, float* head, bool& open, Vector<kWidth>& sum,
                                           Finish finish) {
  constexpr int kInFlight = Policy::kInFlight;
  static_assert(4 % kInFlight == 0, "a step of four entries is taken in whole parts");
  const uint32_t value_stride = t.value_stride;
  const Key first_key = static_cast<Key>(t.first_key);
  const Key padding = chunk.padding;
  const int end = chunk.follows ? kChunk + kFollowed : kChunk;
  Key next_key[4];
  uint32_t next_value[4];
  load_four(chunk.keys, next_key);
  load_four(chunk.values, next_value);
  sum = zeros<kWidth>();
  open = chunk.opens;
  for (int begin = 0; begin < end; begin += 4) {
    Key key[5];
    uint32_t value[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) key[k] = next_key[k], value[k] = next_value[k];
    if (begin + 4 < end) {
      load_four(chunk.keys + begin + 4, next_key);
      load_four(chunk.values + begin + 4, next_value);
      key[4] = next_key[0];
    } else {
      key[4] = chunk.follows ? padding : chunk.after;
    }
    if (begin >= kChunk) {
      // Beyond the chunk only its last run counts.
      if (key[0] != chunk.last) return;
#pragma unroll
      for (int k = 1; k < 4; ++k) {
        if (key[k] != chunk.last) key[k] = padding, value[k] = kNoRow;
      }
      if (key[4] != chunk.last) key[4] = padding;
    }
#pragma unroll
    for (int part = 0; part < 4; part += kInFlight) {
      Vector<kWidth> gradient[kInFlight];
      typename Policy::template Row<kWidth> row[kInFlight];
      float scale[kInFlight];
      bool ends[kInFlight];
      bool was_open = open;
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int k = part + j;
        gradient[j] = zeros<kWidth>();
        scale[j] = 1.0f;
        if (value[k] != kNoRow && !(chunk.skips && key[k] == chunk.first)) {
          const float* from;
          if (kPlain) {
            from = t.values + uint64_t{value[k]} * value_stride;
          } else if (p.partials != nullptr) {
            from = p.partials + uint64_t{value[k]} * p.partial_stride;
          } else if (p.sources != nullptr) {
            const int4 source = __ldg(reinterpret_cast<const int4*>(p.sources + value[k]));
            from = reinterpret_cast<const float*>((static_cast<uint64_t>(static_cast<uint32_t>(source.y)) << 32) |
                                                  static_cast<uint32_t>(source.x));
            scale[j] = __int_as_float(source.z);
          } else {
            from = t.values + uint64_t{value[k]} * value_stride;
            if (t.row_scales != nullptr) scale[j] = __ldg(t.row_scales + value[k]);
          }
          if (active && from != nullptr) gradient[j] = load_constant<kWidth>(from + column);
        }
        ends[j] = key[k] != key[k + 1] && key[k] != padding;
        if (ends[j]) {
          if (!was_open && active) row[j] = Policy::template load<kWidth>(t, p.dtype, key[k] - first_key, column);
          was_open = false;
        }
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (kPlain) {
          add(sum, gradient[j]);
        } else {
          add_scaled(sum, scale[j], gradient[j]);
        }
        if (ends[j]) {
          if (open) {
            if (active && !chunk.skips) store(sum, head + column);
            open = false;
          } else {
            finish(key[part + j], begin + part + j, sum, row[j]);
          }
          sum = zeros<kWidth>();
        }
      }
    }
  }
}

template <typename Key>
__device__ __forceinline__ uint32_t table_of_block(const SegmentLevel<Key>& p) {
  if (p.one_row_a_table) return blockIdx.y;
  // The last table that begins at or before this block.
  uint32_t low = 0, high = p.num_tables - 1;
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (__ldg(&p.spans[middle].first_block) <= blockIdx.x) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <typename Policy, int kWidth, bool kPlain, typename Key>
__global__ void __launch_bounds__(kThreads, kPlain ? Policy::kBlocks : 3)
    segment_kernel(const __grid_constant__ SegmentLevel<Key> p) {
  // In shared memory: stores to rows cannot change it, as far as the compiler is concerned, and reading it is cheap.
  __shared__ SegmentTable t;
  const uint32_t table = table_of_block(p);
  static_assert(sizeof(SegmentTable) % 4 == 0 && sizeof(SegmentTable) / 4 <= kThreads);
  if (threadIdx.x < sizeof(SegmentTable) / 4) {
    reinterpret_cast<uint32_t*>(&t)[threadIdx.x] =
        __ldg(reinterpret_cast<const uint32_t*>(p.tables + table) + threadIdx.x);
  }
  const SegmentSpan span = p.spans[table];
  __syncthreads();
  const uint32_t block = p.one_row_a_table ? blockIdx.x : blockIdx.x - span.first_block;
  const uint32_t number = block * (kThreads >> p.log_lanes) + (threadIdx.x >> p.log_lanes);
  if (number >= span.num_chunks || *p.gate != 0) return;

  const uint32_t lanes = 1u << p.log_lanes;
  const uint32_t lane = threadIdx.x & (lanes - 1);
  const uint32_t dimension = t.dimension;
  const unsigned mask = group_mask(p.log_lanes);
  const Chunk<Key> chunk(p, span, number, static_cast<Key>(t.padding_key));
  const int64_t next = static_cast<int64_t>(span.next_entry) + 2 * static_cast<int64_t>(number);
  float* const head = p.next_partials + next * p.partial_stride;

  // What row-wise rules want to know of whole rows: lane e keeps the sum of squares of the run that ends at entry e,
  // the last lane that of a run that ends in the next chunk. Rows that take one pass are summed on the spot.
  const bool one_pass = dimension <= lanes * kWidth;
  float squares = 0.0f;
  Vector<kWidth> sum;
  bool open;
  if constexpr (Policy::kRowwise) {
    if (!one_pass) {
      for (uint32_t base = 0; base < dimension; base += lanes * kWidth) {
        const uint32_t column = base + lane * kWidth;
        const bool active = column < dimension;
        walk_chunk<Policy, kWidth, kPlain>(p, t, chunk, column, active, head, open, sum,
                                           [&](Key, int position, const Vector<kWidth>& g, const auto& row) {
                                             const float part =
                                                 active ? Policy::squares(t.constants, p.dtype, g, row) : 0.0f;
                                             const float total = group_sum(part, p.log_lanes, mask);
                                             if (lane == min(position, kChunk - 1)) squares += total;
                                           });
      }
    }
  }

  for (uint32_t base = 0; base < dimension; base += lanes * kWidth) {
    const uint32_t column = base + lane * kWidth;
    const bool active = column < dimension;
    const bool last = base + lanes * kWidth >= dimension;
    walk_chunk<Policy, kWidth, kPlain>(
        p, t, chunk, column, active, head, open, sum, [&](Key key, int position, const Vector<kWidth>& g, auto& row) {
          float mean_square = 0.0f;
          if constexpr (Policy::kRowwise) {
            if (one_pass) {
              mean_square = group_sum(active ? Policy::squares(t.constants, p.dtype, g, row) : 0.0f, p.log_lanes, mask);
            } else {
              mean_square = __shfl_sync(mask, squares, min(position, kChunk - 1));
            }
            mean_square /= static_cast<float>(dimension);
          }
          const uint64_t slot = key - static_cast<Key>(t.first_key);
          if (active) Policy::template finish<kWidth>(t, p.dtype, slot, column, g, row, mean_square, last && lane == 0);
        });
    if (chunk.goes_on && active) store(sum, head + (open ? 0 : p.partial_stride) + column);
  }

  if (p.next_keys != nullptr && span.num_chunks > 1 && lane == 0) {
    // A run that began earlier is this chunk's first entry in the next list; when it also goes on, the second entry has
    // its key and no row, so that the run stays in one piece.
    const bool has_head = chunk.opens && !chunk.skips;
    p.next_keys[next] = has_head ? chunk.first : chunk.padding;
    p.next_values[next] = has_head ? static_cast<uint32_t>(next) : kNoRow;
    p.next_keys[next + 1] = chunk.goes_on ? chunk.last : chunk.padding;
    p.next_values[next + 1] = chunk.goes_on && !open ? static_cast<uint32_t>(next + 1) : kNoRow;
    if (number + 1 == span.num_chunks) {
      for (int64_t i = next + 2; (i - span.next_entry) % kChunk != 0; ++i) {
        p.next_keys[i] = chunk.padding;
        p.next_values[i] = kNoRow;
      }
    }
  }
}

// Plain: the first list of rows that are numbered and have no scales, with 16-byte accesses. It is the usual one and
// has a kernel of its own. Keys of 64 bits, of calls with more than 2^32 rows, make do with accesses of four bytes.
template <typename Policy, typename Key>
void launch_rule(const SegmentLevel<Key>& level, int width, bool plain, dim3 blocks, cudaStream_t stream) {
  void (*kernel)(SegmentLevel<Key>) = segment_kernel<Policy, 1, false, Key>;
  if constexpr (sizeof(Key) == 4) {
    if (width == 4) kernel = plain ? segment_kernel<Policy, 4, true, Key> : segment_kernel<Policy, 4, false, Key>;
  }
  kernel<<<blocks, kThreads, 0, stream>>>(level);
  SOK_CUDA_CHECK(cudaGetLastError());
}

}  // namespace sok::cuda

#endif  // SOK_CUDA_SEGMENT_KERNEL_CUH_
