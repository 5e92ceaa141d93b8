// SPDX-License-Identifier: Apache-2.0
// The count matrix [num_ranks, num_tables] that stages after the exchange take.
#ifndef SOK_TENSORFLOW_COUNTS_H_
#define SOK_TENSORFLOW_COUNTS_H_

#include <vector>

#include "support.h"

namespace sok::tf {

// Checks that `counts` is [*, dimensions.size()] with no negative entry.
absl::Status CheckCounts(const Tensor& counts, size_t num_tables);

// Sum of counts, and of counts times dimensions.
int64_t NumKeys(const Tensor& counts);
int64_t NumElements(const Tensor& counts, const std::vector<int64_t>& dimensions);

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_COUNTS_H_
