// SPDX-License-Identifier: Apache-2.0
// Tensors of others that are read later: from a lookup to its backward(), and from there to the optimizer's step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <vector>

namespace sok_torch {

// Whether the memory is not PyTorch's own, so that others may write to it without a count of the change: arrays of
// NumPy, buffers of a reader, memory that processes share.
inline bool is_foreign(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.has_storage()) return false;
  const c10::DataPtr& memory = tensor.storage().data_ptr();
  const c10::Allocator* const own = c10::GetAllocator(memory.device().type());
  return own == nullptr || memory.get_deleter() != own->raw_deleter();
}

// Whether the tensor was written in place: a buffer, likely, that the next batch will be written into. Of tensors of
// inference mode nobody counts it.
inline bool was_written(const at::Tensor& tensor) { return tensor.is_inference() || tensor._version() > 0; }

// Keeps tensors alive and knows whether they still are what they were.
class Borrowed {
 public:
  // One whose changes in place, by PyTorch's count, are to be noticed.
  void add(const at::Tensor& tensor) { held_.push_back({tensor, memory_of(tensor), version_of(tensor)}); }
  void add(const std::vector<at::Tensor>& tensors) {
    held_.reserve(held_.size() + tensors.size());
    for (const at::Tensor& tensor : tensors) add(tensor);
  }
  // One that may be written to, but must stay where it is in memory.
  void keep(const at::Tensor& tensor) { held_.push_back({tensor, memory_of(tensor), kAny}); }
  void keep(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) keep(tensor);
  }

  bool unchanged() const {
    return std::all_of(held_.begin(), held_.end(), [](const Held& held) {
      return (held.version == kAny || held.version == version_of(held.tensor)) && held.memory == memory_of(held.tensor);
    });
  }

  void clear() { held_.clear(); }

 private:
  struct Held {
    at::Tensor tensor;
    const void* memory;
    int64_t version;
  };
  static constexpr int64_t kAny = -2;

  // Asked of hundreds of tensors a step: without the checks that at::Tensor makes.
  static int64_t version_of(const at::Tensor& tensor) {
    at::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
    return impl->is_inference() ? -1 : static_cast<int64_t>(impl->version_counter().current_version());
  }
  static const void* memory_of(const at::Tensor& tensor) {
    at::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
    return impl->has_storage() ? impl->unsafe_storage().data() : nullptr;
  }

  std::vector<Held> held_;
};

}  // namespace sok_torch
