// SPDX-License-Identifier: Apache-2.0
// Tensors that are known without being kept alive: tables of a call, states of an optimizer. Who calls with them holds
// them, and taking a reference to a tensor that Python holds alone costs a quarter of a microsecond, for Python's lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace sok_torch {

class WeakTensors {
 public:
  explicit WeakTensors(const std::vector<at::Tensor>& tensors) {
    tensors_.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) tensors_.emplace_back(tensor.getIntrusivePtr());
  }

  size_t size() const { return tensors_.size(); }

  // Whether all of them are still there.
  bool present() const {
    return std::none_of(tensors_.begin(), tensors_.end(), [](const Weak& weak) { return weak.expired(); });
  }

  // nullptr when it is gone.
  at::TensorImpl* operator[](size_t i) const {
    return tensors_[i].expired() ? nullptr : tensors_[i]._unsafe_get_target();
  }

  // Owned; undefined when it is gone.
  at::Tensor lock(size_t i) const { return at::Tensor(tensors_[i].lock()); }

  // Owned; empty when one is gone.
  std::vector<at::Tensor> lock() const {
    std::vector<at::Tensor> result;
    result.reserve(tensors_.size());
    for (const Weak& weak : tensors_) {
      at::Tensor tensor(weak.lock());
      if (!tensor.defined()) return {};
      result.push_back(std::move(tensor));
    }
    return result;
  }

 private:
  using Weak = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

  std::vector<Weak> tensors_;
};

// All of them as tensors, for a call whose caller holds them: no references are taken. Empty when one is gone.
class BorrowedTensors {
 public:
  explicit BorrowedTensors(const WeakTensors& tensors) {
    if (!tensors.present()) return;
    tensors_.reserve(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) tensors_.emplace_back(Pointer::reclaim(tensors[i]));
  }
  ~BorrowedTensors() {
    for (at::Tensor& tensor : tensors_) tensor.unsafeReleaseTensorImpl();
  }
  BorrowedTensors(const BorrowedTensors&) = delete;
  BorrowedTensors& operator=(const BorrowedTensors&) = delete;

  at::TensorList get() const { return tensors_; }

 private:
  using Pointer = c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

  std::vector<at::Tensor> tensors_;
};

}  // namespace sok_torch
