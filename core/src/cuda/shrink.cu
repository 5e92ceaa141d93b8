// SPDX-License-Identifier: Apache-2.0
// What takes memory from a dynamic table.
#include <algorithm>

#include "cuda/context.h"
#include "cuda/launch.h"
#include "cuda/runtime.h"
#include "table/shrink.h"

namespace sok::cuda {
namespace {

// `words` a row, one thread each.
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const Word* rows, int64_t words, const int64_t* slots, int64_t count, Word* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count * words) out[i] = rows[slots[i / words] * words + i % words];
}

template <typename Word>
void gather(const Scope& scope, const char* rows, int64_t row_bytes, const int64_t* slots, int64_t count, char* out) {
  const int64_t words = row_bytes / int64_t{sizeof(Word)};
  SOK_LAUNCH(gather_kernel<Word>, ceil_div(count * words, kThreads), scope.stream(),
             reinterpret_cast<const Word*>(rows), words, slots, count, reinterpret_cast<Word*>(out));
}

}  // namespace

// Some rows at a time: those that a copy overwrites have been gathered, by it or before.
void move_rows(const sok_context& context, char* rows, int64_t row_bytes, const int64_t* slots, int64_t n,
               const Buffer<char>& temporary) {
  const Scope scope(context);
  const int64_t most = temporary.size() / row_bytes;
  for (int64_t first = 0; first < n; first += most) {
    const int64_t count = std::min(most, n - first);
    if (row_bytes % 16 == 0) {
      gather<uint4>(scope, rows, row_bytes, slots + first, count, temporary.data());
    } else if (row_bytes % 4 == 0) {
      gather<uint32_t>(scope, rows, row_bytes, slots + first, count, temporary.data());
    } else {
      gather<uint16_t>(scope, rows, row_bytes, slots + first, count, temporary.data());
    }
    copy(rows + first * row_bytes, temporary.data(), static_cast<size_t>(count * row_bytes), scope.stream());
  }
}

int64_t fetch(const sok_context& context, const int64_t* number) {
  const Scope scope(context);
  int64_t fetched = 0;
  copy(&fetched, number, sizeof(fetched), scope.stream());
  wait(scope.stream());
  return fetched;
}

}  // namespace sok::cuda
