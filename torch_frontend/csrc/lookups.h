// SPDX-License-Identifier: Apache-2.0
// The lookups of a call, owned.
#pragma once

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
};

}  // namespace sok_torch
