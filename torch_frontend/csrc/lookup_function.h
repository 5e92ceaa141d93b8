// SPDX-License-Identifier: Apache-2.0
// The lookup of a process alone as a function of autograd.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <vector>

#include "delivery.h"
#include "ops.h"
#include "table_list.h"

namespace sok_torch {

// gather_combine in these tables, which must be there. Its gradient goes to them through the op `deliver`.
std::vector<at::Tensor> lookup(const c10::intrusive_ptr<TableList>& list, std::vector<at::Tensor> keys,
                               std::vector<int64_t> key_tables, std::vector<int64_t> combiners,
                               std::vector<at::Tensor> row_splits, std::vector<int64_t> bagged,
                               std::vector<at::Tensor> weights, std::vector<int64_t> weighted);

}  // namespace sok_torch
