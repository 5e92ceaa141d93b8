// SPDX-License-Identifier: Apache-2.0
// The stages of one call on several ranks, between its exchanges (docs/ARCHITECTURE.md, "Rows and sums in one call").
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <optional>
#include <tuple>
#include <vector>

#include "call_gradient.h"
#include "exchange.h"
#include "lookups.h"
#include "message_counts.h"
#include "ops.h"
#include "stages.h"
#include "table_gradient.h"
#include "table_list.h"

namespace sok_torch {

// What the ranks asked of this one, as the owner of rows.
struct AskedRows {
  MessageCounts counts;
  at::Tensor slots;       // of the unique keys of lookups whose rows travel
  at::Tensor part_slots;  // of the keys of bags that are pooled here; undefined: none are
  at::Tensor splits;      // row splits of their parts
};

// torch.classes.sok.ShardedLookup. Its methods are called in their order, without autograd; the exchanges between them
// are the caller's. It borrows the lookups' tensors.
class ShardedLookup final : public torch::CustomClassHolder {
 public:
  // Chooses how each lookup is pooled, and routes both kinds: IndexError for a key outside its table, ValueError for
  // row splits that are none, and with concat where the lookups do not have as many bags. lookups.key_tables are those
  // of `list`. concat: one output holds those of all lookups side by side.
  ShardedLookup(c10::intrusive_ptr<TableList> list, LookupLists lookups, int64_t num_ranks, int64_t rank, bool concat);

  size_t num_tables() const { return tables_.size(); }

  CountMessage message() const;

  // Takes the counts that were swapped, [num_ranks, tables + 2 * lookups] int64 on the CPU. -> the messages of keys
  at::Tensor keys(const at::Tensor& sent, const at::Tensor& received);

  // What of the messages of keys goes to each rank, and what comes; of the messages of rows likewise.
  struct Sizes {
    std::vector<int64_t> send_keys, receive_keys, send_rows, receive_rows;
  };
  Sizes sizes() const;

  // On the owner: the messages of keys that came -> the messages of rows, 1-D float32.
  at::Tensor gather(const at::Tensor& keys);

  // The messages of rows that came -> [bags, dimension] float32 of each lookup, or all side by side in one.
  std::vector<at::Tensor> combine(const at::Tensor& rows);

  // For backward(): output gradients (None where nobody used the output) -> (the gradients of the messages of rows, if
  // those of tables are wanted; the gradient of each weight, if they are). RuntimeError when something borrowed was
  // changed in place since the lookup.
  std::tuple<std::optional<at::Tensor>, std::vector<at::Tensor>> spread(const OptionalTensors& gradients,
                                                                        bool of_tables, bool of_weights) const;

  // values: the gradients of the messages of rows that came -> those of the tables, all of which have one: which do
  // must not depend on the batch. ValueError where they are not as many as were asked for.
  c10::intrusive_ptr<CallGradient> gradient(const at::Tensor& values) const;

  // Frees the tensors: there will be no backward() any more.
  void release();

 private:
  Placement placement() const;
  OptionalTensors of_lookups(const OptionalTensors& gradients) const;
  OptionalTensors of_kind(const std::vector<int64_t>& lookups, const OptionalTensors& gradients) const;

  c10::intrusive_ptr<TableList> list_;
  std::vector<at::Tensor> tables_;
  std::vector<int64_t> dimensions_;
  int64_t num_ranks_, rank_;
  LookupLists lookups_;
  Borrowed kept_;
  bool concat_;

  std::vector<int64_t> others_, pooled_;  // the lookups whose rows travel, and those that are pooled at the owner
  LookupLists rows_, bags_;
  Routing row_routing_;     // of rows_
  BagRouting bag_routing_;  // of bags_
  std::optional<MessageCounts> sent_;
  std::optional<AskedRows> asked_;
  at::Tensor exchanged_rows_;  // kept for the gradients of weights
};

// TableList.route.
c10::intrusive_ptr<ShardedLookup> route_lookups(const c10::intrusive_ptr<TableList>& list, std::vector<at::Tensor> keys,
                                                std::vector<int64_t> combiners, std::vector<at::Tensor> row_splits,
                                                std::vector<int64_t> bagged, std::vector<at::Tensor> weights,
                                                std::vector<int64_t> weighted, int64_t num_ranks, int64_t rank,
                                                bool concat);

// `gradient` as one TableGradient a table.
std::vector<c10::intrusive_ptr<TableGradient>> table_gradients(const c10::intrusive_ptr<ShardedLookup>& lookup,
                                                               const at::Tensor& values);

}  // namespace sok_torch
