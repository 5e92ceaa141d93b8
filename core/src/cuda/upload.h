// SPDX-License-Identifier: Apache-2.0
// Small descriptions of a call in device memory. They travel as kernel parameters: no host memory has to outlive the
// call and a CUDA graph that captures it keeps them.
#ifndef SOK_CUDA_UPLOAD_H_
#define SOK_CUDA_UPLOAD_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "common/error_record.h"
#include "common/memory.h"
#include "cuda/context.h"

namespace sok::cuda {

class Upload {
 public:
  // Adds an array and returns its place, which `at` turns into an address after `send`.
  template <typename T>
  size_t add(const std::vector<T>& items) {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= kAlignment);
    const size_t place = bytes_.size();
    const size_t size = items.size() * sizeof(T);
    bytes_.resize((place + size + kAlignment - 1) / kAlignment * kAlignment);
    if (size > 0) std::memcpy(bytes_.data() + place, items.data(), size);
    return place;
  }

  // Enqueues the copy. With `gate`, *gate becomes 1 when *errors says that something was wrong before, else 0.
  void send(const Scope& scope, int32_t* gate = nullptr, const sok_error_record* errors = nullptr);

  template <typename T>
  const T* at(size_t place) const {
    return reinterpret_cast<const T*>(memory_.data() + place);
  }

 private:
  static constexpr size_t kAlignment = 16;
  std::vector<char> bytes_;
  Buffer<char> memory_;
};

}  // namespace sok::cuda

#endif  // SOK_CUDA_UPLOAD_H_
