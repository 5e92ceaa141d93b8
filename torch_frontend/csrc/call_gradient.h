// SPDX-License-Identifier: Apache-2.0
// What a lookup call leaves for its tables in backward(): one object for all of them.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "borrowed.h"
#include "ops.h"
#include "sok/gradient.h"

namespace sok_torch {

// The gradients of some tables as the core takes them: slots with output gradients, row splits and weights as they are,
// or what came from other ranks. Immutable, but for what it borrows.
class CallGradient final : public c10::intrusive_ptr_target {
 public:
  struct Summand {
    size_t table;
    sok_gradient view;
  };

  // names: one a table. summands: views of `tensors`, of those tables that have a gradient.
  CallGradient(Names names, std::vector<Summand> summands, Borrowed tensors);

  // summands: by table; first: of each table, and the end. Every table has a gradient.
  CallGradient(Names names, std::vector<sok_gradient> summands, std::vector<int64_t> first, Borrowed tensors)
      : names_(std::move(names)),
        summands_(std::move(summands)),
        first_(std::move(first)),
        tensors_(std::move(tensors)),
        of_all_(true) {}

  // Whether the table at this position has a gradient.
  bool reaches(size_t table) const { return of_all_ || first_[table] != first_[table + 1]; }

  // The summands of its gradient.
  at::ArrayRef<sok_gradient> summands(size_t table) const {
    return at::ArrayRef<sok_gradient>(summands_).slice(first_[table], first_[table + 1] - first_[table]);
  }

  std::string name(size_t table) const { return names_.get(table); }

  // Throws RuntimeError, which names the table, when something borrowed was changed in place since backward().
  void check(size_t table) const;

 private:
  Names names_;
  std::vector<sok_gradient> summands_;  // by table
  std::vector<int64_t> first_;          // of each table, and the end
  Borrowed tensors_;
  bool of_all_;
};

}  // namespace sok_torch
