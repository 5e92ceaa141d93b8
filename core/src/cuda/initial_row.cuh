// SPDX-License-Identifier: Apache-2.0
// Initial rows, four columns at once. For sources that are compiled without fused multiply-adds (--fmad=false), as
// table/initial_value.h asks.
#ifndef SOK_CUDA_INITIAL_ROW_CUH_
#define SOK_CUDA_INITIAL_ROW_CUH_

#include <type_traits>

#include "cuda/launch.h"
#include "cuda/vector.cuh"
#include "table/initial_value.h"

namespace sok::cuda {

// Of a row whose elements begin at `to`, and of its copy, if there is one. in_vectors: four elements may be moved at
// once.
template <bool kNormal, typename T>
__device__ __forceinline__ void write_block(const InitialValue& value, uint64_t key, int64_t block, int64_t dimension,
                                            bool in_vectors, T* to, T* copy = nullptr) {
  Vector<4> four;
  float (&columns)[4] = four.v;
  value.columns<kNormal>(key, static_cast<uint32_t>(block), columns);
  if (in_vectors) {
    const auto piece = Piece<T, 4>::of(four);
    piece.store(to + 4 * block);
    if (copy != nullptr) piece.store(copy + 4 * block);
    return;
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (4 * block + c >= dimension) continue;
    to[4 * block + c] = narrow<T>(columns[c]);
    if (copy != nullptr) copy[4 * block + c] = narrow<T>(columns[c]);
  }
}

// Calls run(T*, bool constant) with a null pointer to the dtype's element, and whether values are normal.
template <typename Run>
void with_kernel(sok_dtype dtype, bool is_normal, Run run) {
  with_element(dtype, [&](auto* element) {
    if (is_normal) {
      run(element, std::true_type());
    } else {
      run(element, std::false_type());
    }
  });
}

inline bool moves_in_vectors(int64_t dimension, const void* rows) { return dimension % 4 == 0 && is_aligned(rows); }

}  // namespace sok::cuda

#endif  // SOK_CUDA_INITIAL_ROW_CUH_
