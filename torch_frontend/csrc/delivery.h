// SPDX-License-Identifier: Apache-2.0
// What backward() leaves of a lookup: the gradients of all its tables in one piece (../delivery.py).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <optional>
#include <tuple>
#include <vector>

#include "ops.h"
#include "table_list.h"
#include "tensor_list.h"

namespace sok_torch {

// The lookups of a call as the schemas of library.cc spell them.
struct LookupLists {
  std::vector<at::Tensor> keys;
  std::vector<int64_t> key_tables;
  std::vector<int64_t> combiners;
  std::vector<at::Tensor> row_splits;
  std::vector<int64_t> bagged;
  std::vector<at::Tensor> weights;
  std::vector<int64_t> weighted;
};

// Some of the lookups, in the order of `wanted`.
LookupLists select(const LookupLists& lookups, const std::vector<int64_t>& wanted);

// torch.classes.sok.LookupDelivery: output gradients as they are, with the lookups they belong to. Slots are keys. It
// borrows tensors and remembers how often they had been written to.
class LookupDelivery final : public torch::CustomClassHolder {
 public:
  using Parts = std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>, std::vector<int64_t>, OptionalTensors,
                           OptionalTensors>;

  // gradients: [bags, dimension] of each lookup, undefined where nobody used the output.
  LookupDelivery(c10::intrusive_ptr<TableList> tables, LookupLists lookups, std::vector<at::Tensor> gradients);

  // Whether the table at this position has a gradient.
  bool reaches(size_t table) const { return num_parts_[table] != 0; }

  // Whether what is borrowed is still as it was.
  bool unchanged() const;

  // Whether autograd has a gradient of one of the tables in its .grad.
  bool beside_others() const { return tables_->have_gradients(); }

  // (slots, values, combiners, row_splits, weights) of the parts of one table's gradient.
  Parts parts(int64_t table) const;

  // The op `apply` for the tables of the call, all of which have a gradient; arguments as there, of one step for all.
  // Returns unchanged(), and does nothing when that is false.
  bool apply(const c10::intrusive_ptr<TensorList>& states, int64_t num_states, int64_t kind, int64_t flags,
             std::vector<double> settings, double gradient_scale, std::vector<at::Tensor> stamps,
             std::vector<int64_t> stamped, int64_t stamp) const;

 private:
  // The lookups that have a gradient, in the order of their tables; *values: their gradients.
  LookupLists by_table(std::vector<at::Tensor>* values) const;
  std::vector<int64_t> versions_now() const;

  c10::intrusive_ptr<TableList> tables_;
  LookupLists lookups_;
  std::vector<at::Tensor> gradients_;
  std::vector<int64_t> num_parts_;  // of each table
  std::vector<int64_t> versions_;
};

}  // namespace sok_torch
