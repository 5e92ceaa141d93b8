// SPDX-License-Identifier: Apache-2.0
// The stages of one call on several ranks, between its exchanges (docs/ARCHITECTURE.md, "Rows and sums in one call").
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "delivery.h"
#include "exchanged_gradients.h"
#include "message_counts.h"
#include "ops.h"
#include "table_list.h"

namespace sok_torch {

// torch.classes.sok.ShardedLookup. Its methods are called in their order, without autograd; the exchanges between them
// are the caller's. It borrows the lookups' tensors and remembers how often they had been written to.
class ShardedLookup final : public torch::CustomClassHolder {
 public:
  // Chooses how each lookup is pooled, and routes both kinds: IndexError for a key outside its table, ValueError for
  // row splits that are none. lookups.key_tables are those of `list`.
  ShardedLookup(c10::intrusive_ptr<TableList> list, LookupLists lookups, int64_t num_ranks, int64_t rank);

  // (known, counts, columns) of the message of counts, as the ops count_message and swap_counts take them.
  using Message = std::tuple<at::Tensor, std::vector<at::Tensor>, std::vector<int64_t>>;
  Message message() const;

  // Takes the counts that were swapped, [num_ranks, tables + 2 * lookups] int64 on the CPU. -> (the messages of keys,
  // what of them goes to each rank, what comes; of the messages of rows what goes to each rank, what comes)
  using Keys =
      std::tuple<at::Tensor, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>;
  Keys keys(const at::Tensor& sent, const at::Tensor& received);

  // On the owner: the messages of keys that came -> the messages of rows, 1-D float32.
  at::Tensor gather(const at::Tensor& keys);

  // The messages of rows that came -> [bags, dimension] float32 of each lookup, or all side by side in one.
  std::vector<at::Tensor> combine(const at::Tensor& rows, bool concat);

  // For backward(): output gradients (None where nobody used the output) -> (the gradients of the messages of rows, if
  // the running backward() leads to a table; the gradient of each weight, if it leads to one). RuntimeError when
  // something borrowed was changed in place since the lookup, or was released; NotImplementedError where the result is
  // to be differentiated.
  std::tuple<std::optional<at::Tensor>, std::vector<at::Tensor>> spread(const OptionalTensors& gradients) const;

  // The gradients of the messages of rows that came, by table.
  c10::intrusive_ptr<ExchangedGradients> gradients(at::Tensor values) const;

  // Frees the tensors, unless the running backward() keeps its graph.
  void release();

 private:
  std::vector<int64_t> versions_now() const;
  OptionalTensors of_lookups(const OptionalTensors& gradients) const;
  OptionalTensors of_kind(const std::vector<int64_t>& lookups, const OptionalTensors& gradients) const;

  c10::intrusive_ptr<TableList> list_;
  std::vector<at::Tensor> tables_;
  std::vector<int64_t> dimensions_;
  int64_t num_ranks_, rank_;
  LookupLists lookups_;
  std::vector<int64_t> versions_;
  bool concat_ = false, released_ = false;

  std::vector<int64_t> others_, pooled_;  // the lookups whose rows travel, and those that are pooled at the owner
  LookupLists rows_, bags_;
  at::Tensor unique_, row_counts_, inverse_, order_, unique_splits_;  // of rows_
  at::Tensor part_keys_, part_counts_, splits_, scales_;              // of bags_
  std::optional<MessageCounts> sent_;
  std::shared_ptr<AskedRows> asked_;
  at::Tensor exchanged_rows_;  // kept for the gradients of weights
};

// TableList.route.
c10::intrusive_ptr<ShardedLookup> route_lookups(const c10::intrusive_ptr<TableList>& list, std::vector<at::Tensor> keys,
                                                std::vector<int64_t> combiners, std::vector<at::Tensor> row_splits,
                                                std::vector<int64_t> bagged, std::vector<at::Tensor> weights,
                                                std::vector<int64_t> weighted, int64_t num_ranks, int64_t rank);

}  // namespace sok_torch
