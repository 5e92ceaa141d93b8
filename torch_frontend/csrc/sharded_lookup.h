// SPDX-License-Identifier: Apache-2.0
// The stages of one call on several ranks, between its exchanges (docs/ARCHITECTURE.md, "Rows and sums in one call"),
// on tensors of one device, CPU or CUDA.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <optional>
#include <tuple>
#include <vector>

#include "call_gradient.h"
#include "located_tables.h"
#include "lookups.h"
#include "messages.h"
#include "ops.h"
#include "table_gradient.h"
#include "table_list.h"
#include "views.h"

namespace sok_torch {

// torch.classes.sok.ShardedLookup. Its methods are called in their order, without autograd; the exchanges between them
// are the caller's. It borrows the lookups' tensors. What does not fit throws ValueError.
class ShardedLookup final : public torch::CustomClassHolder {
 public:
  // Chooses how each lookup is pooled, and routes both kinds: IndexError for a key outside its table, ValueError for
  // row splits that are none, and with concat where the lookups do not have as many bags. lookups.key_tables are those
  // of `list`. concat: one output holds those of all lookups side by side. training: what the call may do to tables
  // with an index whose gradients are recorded (located_tables.h).
  ShardedLookup(c10::intrusive_ptr<TableList> list, LookupLists lookups, int64_t num_ranks, int64_t rank, bool concat,
                int64_t training);

  size_t num_tables() const { return tables_.size(); }

  // Those that have gradients, if they require them, at their places; what stands at the others requires none.
  const std::vector<at::Tensor>& tables() const { return tables_; }

  // What is asked of each rank, [num_ranks, tables + 2 * lookups + 1] int64, the last column 0.
  at::Tensor counts() const { return routing_.counts; }

  // Takes the counts that were swapped, on the CPU. -> the messages of keys
  at::Tensor keys(const at::Tensor& sent, const at::Tensor& received);

  // What of the messages of keys goes to each rank, and what comes; of the messages of floats likewise.
  struct Sizes {
    std::vector<int64_t> send_keys, receive_keys, send_rows, receive_rows;
  };
  Sizes sizes() const;

  // On the owner: the messages of keys that came -> the messages of rows and sums, 1-D float32.
  at::Tensor gather(const at::Tensor& keys);

  // The messages of rows and sums that came -> [bags, dimension] float32 of each lookup, or all side by side in one.
  std::vector<at::Tensor> combine(const at::Tensor& floats);

  // For backward(): output gradients (None where nobody used the output) -> (the gradients of the messages that combine
  // read, if those of tables are wanted; the gradient of each weight, if they are). RuntimeError when something
  // borrowed was changed in place since the lookup.
  std::tuple<std::optional<at::Tensor>, std::vector<at::Tensor>> spread(const OptionalTensors& gradients,
                                                                        bool of_tables, bool of_weights) const;

  // values: the gradients of the messages of rows and sums that came -> those of the tables, all of which have one:
  // which do must not depend on the batch.
  c10::intrusive_ptr<CallGradient> gradient(const at::Tensor& values) const;

  // Frees the tensors: there will be no backward() any more.
  void release();

 private:
  struct Routing {
    at::Tensor counts, keys, inverse, order, unique_splits, bag_keys, bag_splits;
    sok_routing view() const;
  };

  // What the ranks ask of this one, as the owner of rows.
  struct Asked {
    Messages messages;
    at::Tensor slots;
    at::Tensor keys;  // the messages, where they hold row splits
  };

  int32_t count() const { return static_cast<int32_t>(tables_.size()); }
  OptionalTensors of_lookups(const OptionalTensors& gradients) const;

  c10::intrusive_ptr<TableList> list_;
  std::vector<at::Tensor> tables_;
  std::optional<LocatedTables> located_;  // if some have an index
  std::vector<int64_t> dimensions_;
  std::vector<sok_placement> placements_;
  LookupLists lookups_;
  Lookups views_;
  Borrowed kept_;
  bool concat_;
  Routing routing_;
  std::optional<Messages> sent_;
  std::optional<Asked> asked_;
  at::Tensor floats_;  // that came, kept for the gradients of weights
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
