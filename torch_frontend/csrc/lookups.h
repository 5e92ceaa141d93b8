// SPDX-License-Identifier: Apache-2.0
// The lookups of a call, owned.
#pragma once

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>

#include <vector>

#include "borrowed.h"
#include "views.h"

namespace sok_torch {

// As the schemas of library.cc spell them.
struct LookupLists {
  std::vector<at::Tensor> keys;
  std::vector<int64_t> key_tables;
  std::vector<int64_t> combiners;
  std::vector<at::Tensor> row_splits;
  std::vector<int64_t> bagged;
  std::vector<at::Tensor> weights;
  std::vector<int64_t> weighted;

  LookupArguments arguments() const { return {keys, key_tables, combiners, row_splits, bagged, weights, weighted}; }

  // Copies what others may write to unseen, before it is kept for backward(); but weights that get a gradient.
  void copy_foreign() {
    copy_if(is_foreign, &keys);
    copy_if(is_foreign, &row_splits);
    copy_if([](const at::Tensor& tensor) { return !tensor.requires_grad() && is_foreign(tensor); }, &weights);
  }

  // Copies what may be a buffer for the next batch, which may come before the optimizer's step (gradient accumulation).
  void copy_buffers() {
    const auto is_buffer = [](const at::Tensor& tensor) { return was_written(tensor) || is_foreign(tensor); };
    copy_if(is_buffer, &keys);
    copy_if(is_buffer, &row_splits);
    copy_if(is_buffer, &weights);
  }

  // Their tensors, as they are now.
  Borrowed borrow() const {
    Borrowed result;
    result.add(keys);
    result.add(row_splits);
    result.add(weights);
    return result;
  }

  void release() {
    keys.clear();
    row_splits.clear();
    weights.clear();
  }

 private:
  // One copy of those that are the same tensor and follow one another, as the row splits of many tables may be.
  template <typename Condition>
  static void copy_if(const Condition& condition, std::vector<at::Tensor>* tensors) {
    const at::TensorImpl* last = nullptr;
    at::Tensor copied;
    for (at::Tensor& tensor : *tensors) {
      if (tensor.unsafeGetTensorImpl() != last) {
        last = tensor.unsafeGetTensorImpl();
        copied = condition(tensor) ? tensor.clone() : at::Tensor();
      }
      if (copied.defined()) tensor = copied;
    }
  }
};

}  // namespace sok_torch
