// SPDX-License-Identifier: Apache-2.0
#include "call_gradient.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace sok_torch {

CallGradient::CallGradient(Names names, std::vector<Summand> summands, Borrowed tensors)
    : names_(std::move(names)), first_(names_.size() + 1, 0), tensors_(std::move(tensors)), of_all_(false) {
  const auto by_table = [](const Summand& a, const Summand& b) { return a.table < b.table; };
  if (!std::is_sorted(summands.begin(), summands.end(), by_table))
    std::stable_sort(summands.begin(), summands.end(), by_table);
  summands_.reserve(summands.size());
  for (const Summand& summand : summands) {
    summands_.push_back(summand.view);
    ++first_.at(summand.table + 1);
  }
  for (size_t i = 1; i < first_.size(); ++i) first_[i] += first_[i - 1];
}

void CallGradient::check(size_t table) const {
  TORCH_CHECK(tensors_.unchanged(), "the ids, weights or output gradient of a lookup in table '", names_.get(table),
              "' were modified in place between backward() and the use of the table's gradient, which is computed from "
              "them. Step the optimizer (or call table.grad.coalesce()) before reusing the memory, or pass a copy to "
              "lookup_sparse");
}

}  // namespace sok_torch
