// SPDX-License-Identifier: Apache-2.0
#include "sharded_function.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "located_tables.h"
#include "lookup_node.h"
#include "sharded_lookup.h"

namespace sok_torch {
namespace {

// From the gradients of the pooled vectors back to the rows of the tables. What it saves, and whether that was changed
// since, is the ShardedLookup's: hooks of saved tensors do not see it, so that who recomputes activations does not make
// the ranks exchange twice.
class ExchangedLookup final : public RecordedLookup {
 public:
  ExchangedLookup(c10::intrusive_ptr<ShardedLookup> routed, c10::intrusive_ptr<Exchange> exchange, at::Device device,
                  double scale)
      : routed_(std::move(routed)), exchange_(std::move(exchange)), device_(device), scale_(scale) {}

  const char* name() const override { return "ShardedLookupBackward"; }
  double scale() const override { return scale_; }
  void release() override { routed_->release(); }

  Gradients backward(std::vector<at::Tensor> gradients, bool of_tables, bool of_weights) override {
    OptionalTensors optional;
    optional.reserve(gradients.size());
    for (const at::Tensor& gradient : gradients) {
      optional.push_back(gradient.defined() ? std::optional<at::Tensor>(gradient) : std::nullopt);
    }
    Gradients result;
    const ShardedLookup::Sizes sizes = routed_->sizes();
    std::optional<at::Tensor> rows;
    try {
      std::tie(rows, result.of_weights) = routed_->spread(optional, of_tables, of_weights);
    } catch (...) {
      if (!of_tables) throw;
      // The other ranks wait for these rows, and hear of the failure before any of them uses one.
      exchange_->keep_failure(std::current_exception());
      const int64_t size = std::accumulate(sizes.receive_rows.begin(), sizes.receive_rows.end(), int64_t{0});
      rows = at::zeros({size}, at::TensorOptions(device_).dtype(at::kFloat));
    }
    if (rows.has_value()) {
      result.of_tables = routed_->gradient(exchange_->all_to_all(*rows, sizes.receive_rows, sizes.send_rows));
    }
    return result;
  }

 private:
  c10::intrusive_ptr<ShardedLookup> routed_;
  c10::intrusive_ptr<Exchange> exchange_;
  at::Device device_;
  double scale_;
};

}  // namespace

std::vector<at::Tensor> sharded_lookup(const c10::intrusive_ptr<TableList>& list, LookupLists lookups, bool concat,
                                       int64_t training, const c10::intrusive_ptr<Exchange>& exchange,
                                       double gradient_scale) {
  const at::Tensor first = list->weak().lock(0);
  TORCH_CHECK(first.defined(), "a table of the call is gone");
  const at::Device device = first.device();
  const std::vector<at::Tensor> weights = lookups.weights;
  bool recorded = false;
  c10::intrusive_ptr<ShardedLookup> routed;
  std::vector<at::Tensor> outputs;
  try {
    if (at::GradMode::is_enabled()) {
      lookups.copy_foreign();
    } else {
      training = kEvaluates;
    }
    {
      const at::NoGradGuard no_grad;
      routed = c10::make_intrusive<ShardedLookup>(list, std::move(lookups), exchange->num_ranks(), exchange->rank(),
                                                  concat, training);
    }
    recorded = is_recorded(routed->tables(), weights);
  } catch (...) {
    exchange->tell_of_failure(device, static_cast<int64_t>(list->size() + 2 * list->positions().size() + 1));
    throw;
  }
  {
    const at::NoGradGuard no_grad;
    const auto [sent, received] = exchange->swap_counts(routed->counts());
    at::Tensor messages = routed->keys(sent, received);
    const ShardedLookup::Sizes sizes = routed->sizes();
    messages = exchange->all_to_all(messages, sizes.send_keys, sizes.receive_keys);
    try {
      messages = routed->gather(messages);
    } catch (...) {
      // The other ranks wait for these rows. They hear of it before any table changes: with the step, or the next call.
      exchange->keep_failure(std::current_exception());
      const int64_t size = std::accumulate(sizes.send_rows.begin(), sizes.send_rows.end(), int64_t{0});
      messages = at::zeros({size}, at::TensorOptions(device).dtype(at::kFloat));
    }
    messages = exchange->all_to_all(messages, sizes.send_rows, sizes.receive_rows);
    outputs = routed->combine(messages);
  }
  if (recorded) {
    const std::vector<at::Tensor> tables = routed->tables();
    auto kept = std::make_unique<ExchangedLookup>(std::move(routed), exchange, device, gradient_scale);
    record(&outputs, list, tables, weights, std::move(kept));
  }
  return outputs;
}

}  // namespace sok_torch
