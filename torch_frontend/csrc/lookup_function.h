// SPDX-License-Identifier: Apache-2.0
// A lookup call, of a process alone and of several, as a function of autograd (lookup_node.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <vector>

#include "exchange.h"
#include "ops.h"
#include "table_list.h"

namespace sok_torch {

// The lookups in these tables, which must be there: gather_combine, or with the number of an exchange
// `sharded_lookup`, which alone heeds gradient_scale. training: what the call may do to tables with an index whose
// gradients are recorded (located_tables.h).
std::vector<at::Tensor> lookup(const c10::intrusive_ptr<TableList>& list, std::vector<at::Tensor> keys,
                               std::vector<int64_t> combiners, std::vector<at::Tensor> row_splits,
                               std::vector<int64_t> bagged, std::vector<at::Tensor> weights,
                               std::vector<int64_t> weighted, bool concat, int64_t training,
                               std::optional<int64_t> exchange, double gradient_scale);

// The same where every lookup has row splits and none has weights; nothing where `plain_pairs` says no.
std::optional<std::vector<at::Tensor>> lookup_pairs(const c10::intrusive_ptr<TableList>& list,
                                                    std::vector<at::Tensor> keys, std::vector<at::Tensor> row_splits,
                                                    std::vector<int64_t> combiners, at::Device device, bool concat,
                                                    int64_t training, std::optional<int64_t> exchange,
                                                    double gradient_scale);

}  // namespace sok_torch
