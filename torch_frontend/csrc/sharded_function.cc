// SPDX-License-Identifier: Apache-2.0
// A call on several ranks, with its exchanges, as a function of autograd.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <string>
#include <utility>

#include "delivering_node.h"
#include "sharded_lookup.h"

namespace sok_torch {
namespace {

namespace autograd = torch::autograd;
using autograd::variable_list;

// From the gradients of the pooled vectors back to the rows of the tables. What it saves, and whether that was changed
// since, is the ShardedLookup's: hooks of saved tensors do not see it, so that who recomputes activations does not make
// the ranks exchange twice.
class ShardedLookupBackward final : public DeliveringNode {
 public:
  ShardedLookupBackward(std::vector<at::Tensor> tables, at::TensorList weights,
                        c10::intrusive_ptr<ShardedLookup> routed, c10::intrusive_ptr<Exchange> exchange)
      : DeliveringNode(std::move(tables), weights), routed_(std::move(routed)), exchange_(std::move(exchange)) {}

  std::string name() const override { return "ShardedLookupBackward"; }

 private:
  variable_list differentiate(variable_list&& gradients) override {
    const at::NoGradGuard no_grad;
    OptionalTensors optional;
    optional.reserve(gradients.size());
    for (const at::Tensor& gradient : gradients) {
      optional.push_back(gradient.defined() ? std::optional<at::Tensor>(gradient) : std::nullopt);
    }
    auto [rows, of_weights] = routed_->spread(optional, leads_to_tables(), leads_to_weights());
    c10::intrusive_ptr<ExchangedGradients> exchanged;
    if (rows.has_value()) {
      const ShardedLookup::Sizes sizes = routed_->sizes();
      exchanged = routed_->gradients(exchange_->all_to_all(*rows, sizes.receive_rows, sizes.send_rows));
    }
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("sok::deliver_exchanged", "")
                               .typed<std::vector<at::Tensor>(const c10::intrusive_ptr<ExchangedGradients>&,
                                                              at::TensorList, at::IntArrayRef, at::IntArrayRef)>();
    // Every table has a gradient, although nothing may have come for it: which do must not depend on the batch.
    return deliver([](size_t) { return true; },
                   [&](at::IntArrayRef delivered, at::IntArrayRef carried) {
                     return op.call(exchanged, tables(), delivered, carried);
                   },
                   std::move(of_weights));
  }

  void release() override { routed_->release(); }

  c10::intrusive_ptr<ShardedLookup> routed_;
  c10::intrusive_ptr<Exchange> exchange_;
};

}  // namespace

std::vector<at::Tensor> sharded_lookup(const c10::intrusive_ptr<TableList>& list, LookupLists lookups, bool concat,
                                       const c10::intrusive_ptr<Exchange>& exchange) {
  std::vector<at::Tensor> tables = list->tables();
  TORCH_CHECK(!tables.empty(), "a table of the call is gone");
  const at::Device device = tables[0].device();
  const std::vector<at::Tensor> weights = lookups.weights;
  bool recorded = false;
  c10::intrusive_ptr<ShardedLookup> routed;
  std::vector<at::Tensor> outputs;
  try {
    recorded = is_recorded(tables, weights);
    const at::NoGradGuard no_grad;
    routed =
        c10::make_intrusive<ShardedLookup>(list, std::move(lookups), exchange->num_ranks(), exchange->rank(), concat);
  } catch (...) {
    exchange->tell_of_failure(device, static_cast<int64_t>(list->size() + 2 * list->positions().size()));
    throw;
  }
  {
    const at::NoGradGuard no_grad;
    const auto [sent, received] = exchange->swap_counts(device, routed->message());
    at::Tensor messages = routed->keys(sent, received);
    const ShardedLookup::Sizes sizes = routed->sizes();
    messages = exchange->all_to_all(messages, sizes.send_keys, sizes.receive_keys);
    messages = exchange->all_to_all(routed->gather(messages), sizes.send_rows, sizes.receive_rows);
    outputs = routed->combine(messages);
  }
  if (recorded) {
    autograd::set_history(outputs,
                          make_node<ShardedLookupBackward>(std::move(tables), weights, std::move(routed), exchange));
  }
  return outputs;
}

}  // namespace sok_torch
