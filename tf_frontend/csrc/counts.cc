// SPDX-License-Identifier: Apache-2.0
#include "counts.h"

namespace sok::tf {

absl::Status CheckCounts(const Tensor& counts, size_t num_tables) {
  if (counts.dims() != 2 || counts.dim_size(1) != static_cast<int64_t>(num_tables)) {
    return errors::InvalidArgument("counts must be [num_ranks, ", num_tables, "], not ", counts.shape().DebugString());
  }
  const auto flat = counts.flat<int64_t>();
  for (int64_t i = 0; i < flat.size(); ++i) {
    if (flat(i) < 0) return errors::InvalidArgument("counts must not be negative: ", flat(i));
  }
  return absl::OkStatus();
}

int64_t NumKeys(const Tensor& counts) {
  int64_t sum = 0;
  const auto flat = counts.flat<int64_t>();
  for (int64_t i = 0; i < flat.size(); ++i) sum += flat(i);
  return sum;
}

int64_t NumElements(const Tensor& counts, const std::vector<int64_t>& dimensions) {
  int64_t sum = 0;
  const auto matrix = counts.matrix<int64_t>();
  for (int64_t rank = 0; rank < counts.dim_size(0); ++rank) {
    for (size_t table = 0; table < dimensions.size(); ++table) sum += matrix(rank, table) * dimensions[table];
  }
  return sum;
}

}  // namespace sok::tf
