// SPDX-License-Identifier: Apache-2.0
#include "exchanged_gradients.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "apply.h"
#include "views.h"

namespace sok_torch {
namespace {

int64_t sum(const std::vector<int64_t>& numbers) { return std::accumulate(numbers.begin(), numbers.end(), int64_t{0}); }

void check_size(const at::Tensor& tensor, at::ScalarType dtype, int64_t size, const char* what) {
  TORCH_CHECK_VALUE(tensor.defined() && tensor.dim() == 1 && tensor.size(0) == size && tensor.scalar_type() == dtype &&
                        tensor.is_contiguous(),
                    what, " must be [", size, "] ", dtype);
}

sok_tensor range(const sok_tensor& array, int64_t first, int64_t size) {
  sok_tensor result = array;
  result.data = static_cast<int64_t*>(array.data) + first;
  result.shape[0] = size;
  return result;
}

}  // namespace

ExchangedGradients::ExchangedGradients(c10::intrusive_ptr<TableList> tables, std::shared_ptr<const AskedRows> asked,
                                       at::Tensor values)
    : tables_(std::move(tables)),
      asked_(std::move(asked)),
      values_(std::move(values)),
      num_parts_(asked_->dimensions.size(), 0) {
  const MessageCounts& counts = asked_->counts;
  check_size(values_, at::kFloat, sum(counts.elements_of_rows) + sum(counts.elements_of_sums), "values");
  check_size(asked_->slots, at::kLong, sum(counts.keys_of_rows), "slots");
  if (counts.pooled()) {
    check_size(asked_->part_slots, at::kLong, sum(counts.keys_of_bags), "part_slots");
    check_size(asked_->splits, at::kLong, sum(counts.splits_of_bags), "splits");
  }
  const auto num_tables = static_cast<int64_t>(num_parts_.size());
  const std::vector<int64_t>& positions = tables_->positions();
  const auto num_lookups = static_cast<int64_t>(positions.size());
  int64_t slot = 0, part_slot = 0, split = 0, element = 0;
  std::vector<Place> of_bags;
  for (size_t rank = 0; rank < counts.num_ranks(); ++rank) {
    for (int64_t table = 0; table < num_tables; ++table) {
      const int64_t n = counts.rows[rank * num_tables + table];
      if (n > 0) places_.push_back({table, slot, n, element, n, -1});
      slot += n;
      element += n * asked_->dimensions[table];
    }
    for (int64_t lookup = 0; lookup < num_lookups; ++lookup) {
      const int64_t n = counts.keys[rank * num_lookups + lookup], splits = counts.splits[rank * num_lookups + lookup];
      if (splits == 0) continue;
      const int64_t table = positions[lookup];
      if (n > 0) of_bags.push_back({table, part_slot, n, element, splits - 1, split});
      part_slot += n;
      split += splits;
      element += (splits - 1) * asked_->dimensions[table];
    }
  }
  places_.insert(places_.end(), of_bags.begin(), of_bags.end());
  std::stable_sort(places_.begin(), places_.end(), [](const Place& a, const Place& b) { return a.table < b.table; });
  for (const Place& place : places_) ++num_parts_[place.table];
}

ExchangedGradients::Parts ExchangedGradients::parts(int64_t table) const {
  Parts result;
  auto& [slots, values, splits] = result;
  for (const Place& place : places_) {
    if (place.table != table) continue;
    const int64_t dimension = asked_->dimensions[table];
    const bool bagged = place.first_split >= 0;
    slots.push_back((bagged ? asked_->part_slots : asked_->slots).narrow(0, place.first_slot, place.num_slots));
    values.push_back(
        values_.narrow(0, place.first_element, place.num_values * dimension).view({place.num_values, dimension}));
    if (bagged) {
      splits.push_back(asked_->splits.narrow(0, place.first_split, place.num_values + 1));
    } else {
      splits.push_back(std::nullopt);
    }
  }
  return result;
}

void ExchangedGradients::apply(const c10::intrusive_ptr<TensorList>& states, int64_t num_states, int64_t kind,
                               int64_t flags, std::vector<double> settings, double gradient_scale,
                               std::vector<at::Tensor> stamps, std::vector<int64_t> stamped, int64_t stamp) const {
  const sok_tensor values = view(values_, "values"), slots = view(asked_->slots, "slots");
  const bool pooled = asked_->counts.pooled();
  const sok_tensor part_slots = pooled ? view(asked_->part_slots, "part_slots") : kAbsent;
  const sok_tensor splits = pooled ? view(asked_->splits, "splits") : kAbsent;
  std::vector<sok_gradient> parts;
  parts.reserve(places_.size());
  for (const Place& place : places_) {
    sok_gradient part = SOK_GRADIENT_INIT;
    part.combiner = 0;  // sums of rows
    const bool bagged = place.first_split >= 0;
    part.slots = range(bagged ? part_slots : slots, place.first_slot, place.num_slots);
    part.values = values;
    part.values.data = static_cast<float*>(values.data) + place.first_element;
    part.values.rank = 2;
    part.values.shape[0] = place.num_values;
    part.values.shape[1] = asked_->dimensions[place.table];
    if (bagged) {
      part.row_splits = range(splits, place.first_split, place.num_values + 1);
    } else {
      part.flags |= SOK_GRADIENT_UNIQUE;
    }
    parts.push_back(part);
  }
  const BorrowedTensors borrowed(tables_->weak()), of_states(states->tensors());
  const at::TensorList tables = borrowed.get();
  TORCH_CHECK(tables.size() == num_parts_.size(), "a table of the gradient is gone");
  const std::vector<int64_t> states_of_each(tables.size(), num_states);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  apply_parts(tables, of_states.get(), tables_->names(), states_of_each, num_parts_, parts, {kind}, {flags}, settings,
              {gradient_scale}, stamps, stamped, stamp);
}

}  // namespace sok_torch
