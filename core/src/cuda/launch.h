// SPDX-License-Identifier: Apache-2.0
// Sizes of launches.
#ifndef SOK_CUDA_LAUNCH_H_
#define SOK_CUDA_LAUNCH_H_

#include <algorithm>
#include <cstdint>

#include "cuda/check.h"

namespace sok::cuda {

constexpr int kThreads = 256;  // of a block, in every kernel
constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int64_t kMaxBlocks = INT32_MAX;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline unsigned grid_of(int64_t blocks) {
  SOK_CHECK(blocks <= kMaxBlocks, "the call is too large for one launch: ", blocks, " blocks");
  return static_cast<unsigned>(blocks);
}

inline int ceil_log2(int64_t value) {
  int bits = 0;
  while (bits < 62 && (int64_t{1} << bits) < value) ++bits;
  return bits;
}

// How a row of `dimension` elements is spread over threads: `width` elements each (one 16-byte access of float32, or
// one element where rows are not aligned for that), 2^log_lanes threads side by side, as often as the row takes.
inline int width_of(int64_t dimension, bool aligned) { return dimension % 4 == 0 && aligned ? 4 : 1; }
// The same for rows that are only read: of 16 bits an element, eight or four elements at once. Rows begin at multiples
// of `multiple` elements.
constexpr int kMaxWidth = 8;
inline int width_of_rows(int64_t dimension, int64_t multiple, int64_t item_size, bool aligned) {
  for (int64_t width = 16 / item_size; width >= 4; width /= 2) {
    if (aligned && dimension % width == 0 && multiple % width == 0) return static_cast<int>(width);
  }
  return 1;
}
inline int log_lanes_of(int64_t dimension, int width) { return std::min(5, ceil_log2(ceil_div(dimension, width))); }
inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace sok::cuda

// kernel, blocks, stream, arguments
#define SOK_LAUNCH(kernel, blocks, stream, ...)                                                    \
  do {                                                                                             \
    const int64_t sok_blocks = (blocks);                                                           \
    if (sok_blocks > 0) {                                                                          \
      kernel<<<::sok::cuda::grid_of(sok_blocks), ::sok::cuda::kThreads, 0, stream>>>(__VA_ARGS__); \
      SOK_CUDA_CHECK(cudaGetLastError());                                                          \
    }                                                                                              \
  } while (false)

#endif  // SOK_CUDA_LAUNCH_H_
