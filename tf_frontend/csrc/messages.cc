// SPDX-License-Identifier: Apache-2.0
#include "messages.h"

namespace sok::tf {

absl::Status Messages::Read(const Tensor& counts, const std::vector<int64_t>& dimensions,
                            const std::vector<int64_t>& lookup_tables) {
  const int64_t columns = NumColumns(dimensions.size(), lookup_tables.size());
  if (counts.dims() != 2 || counts.dim_size(1) != columns) {
    return errors::InvalidArgument("counts must be [num_ranks, ", columns, "], not ", counts.shape().DebugString());
  }
  keys_.resize(counts.dim_size(0));
  floats_.resize(counts.dim_size(0));
  view_ = {};
  view_.struct_size = sizeof(sok_messages);
  view_.num_ranks = static_cast<int32_t>(counts.dim_size(0));
  view_.num_tables = static_cast<int32_t>(dimensions.size());
  view_.num_lookups = static_cast<int32_t>(lookup_tables.size());
  view_.dimensions = dimensions.data();
  view_.lookup_tables = lookup_tables.data();
  view_.counts = static_cast<const int64_t*>(counts.data());
  view_.row_stride = columns;
  return ToStatus(sok_messages_read(&view_, keys_.data(), floats_.data()));
}

absl::Status Messages::Lookups(const sok_tensor& keys, const sok_tensor& slots, const sok_tensor& floats,
                               std::vector<sok_lookup>* lookups) const {
  lookups->resize(view_.num_parts);
  return ToStatus(sok_owner_lookups(&view_, keys, slots, floats, lookups->data()));
}

}  // namespace sok::tf
