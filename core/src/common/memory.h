// SPDX-License-Identifier: Apache-2.0
// Temporary memory of a call, from the allocator of its context. Only the calling thread may make or drop a Buffer.
#ifndef SOK_COMMON_MEMORY_H_
#define SOK_COMMON_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <type_traits>
#include <utility>

#include "common/status.h"
#include "sok/context.h"

namespace sok {

template <typename T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 64, "memory is neither constructed nor destroyed");

 public:
  Buffer() = default;
  Buffer(const sok_context& context, int64_t size) : allocator_(context.allocator), size_(size) {
    if (size == 0) return;
    size_t bytes = 0;
    if (size < 0 || __builtin_mul_overflow(static_cast<size_t>(size), sizeof(T), &bytes) || bytes > PTRDIFF_MAX - 64) {
      fail(SOK_RESOURCE_EXHAUSTED, "temporary memory for ", size, " elements does not fit the address space");
    }
    bytes = (bytes + 63) / 64 * 64;
    void* memory =
        allocator_.allocate != nullptr ? allocator_.allocate(allocator_.opaque, bytes) : std::aligned_alloc(64, bytes);
    SOK_CHECK_STATUS(SOK_RESOURCE_EXHAUSTED, memory != nullptr, "no ", bytes, " bytes of temporary memory");
    data_ = static_cast<T*>(memory);
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() {
    if (data_ == nullptr) return;
    if (allocator_.allocate != nullptr) {
      allocator_.release(allocator_.opaque, data_);
    } else {
      std::free(data_);
    }
  }

  T* data() const { return data_; }
  int64_t size() const { return size_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(allocator_, other.allocator_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

  sok_allocator allocator_ = {nullptr, nullptr, nullptr};
  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace sok

#endif  // SOK_COMMON_MEMORY_H_
