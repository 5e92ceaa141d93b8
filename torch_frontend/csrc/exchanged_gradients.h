// SPDX-License-Identifier: Apache-2.0
// What backward() leaves of a lookup on several ranks: the gradients that came for this rank's tables, in one piece
// (../delivery.py).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <memory>
#include <tuple>
#include <vector>

#include "message_counts.h"
#include "ops.h"
#include "sok/gradient.h"
#include "table_list.h"
#include "tensor_list.h"

namespace sok_torch {

// What the ranks asked of this one, as the owner of rows.
struct AskedRows {
  MessageCounts counts;
  std::vector<int64_t> dimensions;  // of each table
  at::Tensor slots;                 // of the unique keys of lookups whose rows travel
  at::Tensor part_slots;            // of the keys of bags that are pooled here; undefined: none are
  at::Tensor splits;                // row splits of their parts
};

// torch.classes.sok.ExchangedGradients.
class ExchangedGradients final : public torch::CustomClassHolder {
 public:
  using Parts = std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>, OptionalTensors>;

  // values: the gradients of the messages of rows, flat, from all ranks.
  ExchangedGradients(c10::intrusive_ptr<TableList> tables, std::shared_ptr<const AskedRows> asked, at::Tensor values);

  // Whether autograd has a gradient of one of the tables in its .grad.
  bool beside_others() const { return tables_->have_gradients(); }

  // (slots [n], values [m, dimension], row splits [m + 1] or None: m = n, each slot once) of the table at this
  // position, from the ranks that sent any.
  Parts parts(int64_t table) const;

  // The op `apply` for the tables of the call; arguments as there, of one step for all.
  void apply(const c10::intrusive_ptr<TensorList>& states, int64_t num_states, int64_t kind, int64_t flags,
             std::vector<double> settings, double gradient_scale, std::vector<at::Tensor> stamps,
             std::vector<int64_t> stamped, int64_t stamp) const;

 private:
  // Where the gradients of one rank for one table, or for a lookup that is pooled here, lie in the arrays.
  struct Place {
    int64_t table;
    int64_t first_slot, num_slots;
    int64_t first_element, num_values;
    int64_t first_split;  // -1: without row splits
  };

  c10::intrusive_ptr<TableList> tables_;
  std::shared_ptr<const AskedRows> asked_;
  at::Tensor values_;
  std::vector<Place> places_;       // by table
  std::vector<int64_t> num_parts_;  // of each table
};

}  // namespace sok_torch
