// SPDX-License-Identifier: Apache-2.0
#include "delivery.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace sok_torch {

LookupLists select(const LookupLists& lookups, const std::vector<int64_t>& wanted) {
  LookupLists result;
  std::vector<int64_t> place(lookups.keys.size(), -1);
  for (const int64_t i : wanted) {
    place[i] = static_cast<int64_t>(result.keys.size());
    result.keys.push_back(lookups.keys[i]);
    result.key_tables.push_back(lookups.key_tables[i]);
    result.combiners.push_back(lookups.combiners[i]);
  }
  const auto move = [&place](const std::vector<at::Tensor>& from, const std::vector<int64_t>& positions,
                             std::vector<at::Tensor>* tensors, std::vector<int64_t>* places) {
    for (size_t j = 0; j < positions.size(); ++j) {
      if (place[positions[j]] < 0) continue;
      tensors->push_back(from[j]);
      places->push_back(place[positions[j]]);
    }
  };
  move(lookups.row_splits, lookups.bagged, &result.row_splits, &result.bagged);
  move(lookups.weights, lookups.weighted, &result.weights, &result.weighted);
  return result;
}

LookupDelivery::LookupDelivery(c10::intrusive_ptr<TableList> tables, LookupLists lookups,
                               std::vector<at::Tensor> gradients)
    : tables_(std::move(tables)),
      lookups_(std::move(lookups)),
      gradients_(std::move(gradients)),
      num_parts_(tables_->size(), 0) {
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (gradients_[i].defined()) ++num_parts_[lookups_.key_tables[i]];
  }
  // Keys that were written in place are likely a buffer that the next batch will be written into, perhaps before the
  // optimizer steps (gradient accumulation). Keys that never were are borrowed.
  for (at::Tensor& keys : lookups_.keys) {
    if (!keys.is_inference() && keys._version() > 0) keys = keys.clone();
  }
  versions_ = versions_now();
}

std::vector<int64_t> LookupDelivery::versions_now() const {
  std::vector<int64_t> result;
  result.reserve(2 * lookups_.keys.size() + lookups_.row_splits.size() + lookups_.weights.size());
  const auto add = [&result](const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) {
      result.push_back(!tensor.defined() || tensor.is_inference() ? -1 : tensor._version());
    }
  };
  add(lookups_.keys);
  add(lookups_.row_splits);
  add(lookups_.weights);
  add(gradients_);
  return result;
}

bool LookupDelivery::unchanged() const { return versions_now() == versions_; }

LookupDelivery::Parts LookupDelivery::parts(int64_t table) const {
  Parts result;
  auto& [slots, values, combiners, row_splits, weights] = result;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (lookups_.key_tables[i] != table || !gradients_[i].defined()) continue;
    slots.push_back(lookups_.keys[i]);
    values.push_back(gradients_[i]);
    combiners.push_back(lookups_.combiners[i]);
    const auto find = [i](const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& lookups) {
      for (size_t j = 0; j < lookups.size(); ++j) {
        if (lookups[j] == static_cast<int64_t>(i)) return std::optional<at::Tensor>(tensors[j]);
      }
      return std::optional<at::Tensor>();
    };
    row_splits.push_back(find(lookups_.row_splits, lookups_.bagged));
    weights.push_back(find(lookups_.weights, lookups_.weighted));
  }
  return result;
}

LookupLists LookupDelivery::by_table(std::vector<at::Tensor>* values) const {
  std::vector<int64_t> order;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (gradients_[i].defined()) order.push_back(static_cast<int64_t>(i));
  }
  const std::vector<int64_t>& tables = lookups_.key_tables;
  if (order.size() == gradients_.size() && std::is_sorted(tables.begin(), tables.end())) {
    *values = gradients_;
    return lookups_;
  }
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return tables[a] < tables[b]; });
  for (const int64_t i : order) values->push_back(gradients_[i]);
  return select(lookups_, order);
}

bool LookupDelivery::apply(const c10::intrusive_ptr<TensorList>& states, int64_t num_states, int64_t kind,
                           int64_t flags, std::vector<double> settings, double gradient_scale,
                           std::vector<at::Tensor> stamps, std::vector<int64_t> stamped, int64_t stamp) const {
  if (!unchanged()) return false;
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("sok::apply", "").typed<decltype(sok_torch::apply)>();
  const BorrowedTensors borrowed(tables_->weak()), of_states(states->tensors());
  const at::TensorList tables = borrowed.get();
  TORCH_CHECK(tables.size() == num_parts_.size(), "a table of the gradient is gone");
  std::vector<at::Tensor> values;
  const LookupLists parts = by_table(&values);
  const std::vector<int64_t> states_of_each(tables.size(), num_states);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.call(tables, of_states.get(), tables_->names(), states_of_each, num_parts_, parts.keys, values, parts.combiners,
          parts.row_splits, parts.bagged, parts.weights, parts.weighted, {}, {kind}, {flags}, settings,
          {gradient_scale}, stamps, stamped, stamp);
  return true;
}

}  // namespace sok_torch
