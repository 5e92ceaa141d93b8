// SPDX-License-Identifier: Apache-2.0
// The lookup of a process alone as a function of autograd: gather_combine, and its gradient, which is delivered to the
// tables in one piece (../delivery.py).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <vector>

#include "delivery.h"
#include "ops.h"
#include "table_list.h"

namespace sok_torch {

// gather_combine in these tables, which must be there. Its gradient goes to them through the op `deliver`.
std::vector<at::Tensor> lookup(const c10::intrusive_ptr<TableList>& list, std::vector<at::Tensor> keys,
                               std::vector<int64_t> combiners, std::vector<at::Tensor> row_splits,
                               std::vector<int64_t> bagged, std::vector<at::Tensor> weights,
                               std::vector<int64_t> weighted, bool concat);

// The same where every lookup has row splits and none has weights; nothing where `plain_pairs` says no.
std::optional<std::vector<at::Tensor>> lookup_pairs(const c10::intrusive_ptr<TableList>& list,
                                                    std::vector<at::Tensor> keys, std::vector<at::Tensor> row_splits,
                                                    std::vector<int64_t> combiners, at::Device device, bool concat);

}  // namespace sok_torch
