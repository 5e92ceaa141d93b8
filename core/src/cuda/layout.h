// SPDX-License-Identifier: Apache-2.0
// Arrays of one call side by side in one piece of temporary memory.
#ifndef SOK_CUDA_LAYOUT_H_
#define SOK_CUDA_LAYOUT_H_

#include <cstdint>
#include <type_traits>

#include "cuda/launch.h"

namespace sok::cuda {

// Gives arrays their places, one after the other. With nullptr for the memory it tells how much they take.
class Layout {
 public:
  explicit Layout(char* memory) : memory_(reinterpret_cast<uintptr_t>(memory)) {}

  template <typename T>
  void place(T*& array, int64_t count) {
    array = reinterpret_cast<T*>(memory_ + static_cast<uintptr_t>(bytes_));
    bytes_ = round_up(bytes_ + count * int64_t{sizeof(T)}, 16);
  }
  int64_t bytes() const { return bytes_; }

 private:
  uintptr_t memory_;
  int64_t bytes_ = 0;
};

}  // namespace sok::cuda

#endif  // SOK_CUDA_LAYOUT_H_
