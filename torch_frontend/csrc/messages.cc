// SPDX-License-Identifier: Apache-2.0
#include "messages.h"

#include <c10/util/Exception.h>

#include <utility>

#include "status.h"

namespace sok_torch {

Messages::Messages(at::Tensor swapped, const std::vector<int64_t>& dimensions, const std::vector<int64_t>& positions)
    : counts(std::move(swapped)) {
  const size_t columns = dimensions.size() + 2 * positions.size();
  TORCH_CHECK_VALUE(counts.dim() == 2 && counts.size(1) >= static_cast<int64_t>(columns) && counts.is_cpu() &&
                        counts.scalar_type() == at::kLong && counts.stride(1) == 1,
                    "counts must be [ranks, ", columns, "] int64 on the CPU");
  keys.resize(counts.size(0));
  floats.resize(counts.size(0));
  view = {};
  view.struct_size = sizeof(sok_messages);
  view.num_ranks = static_cast<int32_t>(counts.size(0));
  view.num_tables = static_cast<int32_t>(dimensions.size());
  view.num_lookups = static_cast<int32_t>(positions.size());
  view.dimensions = dimensions.data();
  view.lookup_tables = positions.data();
  view.counts = counts.const_data_ptr<int64_t>();
  view.row_stride = counts.stride(0);
  check(sok_messages_read(&view, keys.data(), floats.data()));
}

}  // namespace sok_torch
