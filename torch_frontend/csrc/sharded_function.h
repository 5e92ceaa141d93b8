// SPDX-License-Identifier: Apache-2.0
// A call on several ranks with its exchanges.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <vector>

#include "exchange.h"
#include "lookups.h"
#include "table_list.h"

namespace sok_torch {

// All ranks make it together, and run backward() through it if one does. Where this rank fails before the exchanges the
// others are told, and throw PeerError. gradient_scale: what the gradients of tables are multiplied with.
std::vector<at::Tensor> sharded_lookup(const c10::intrusive_ptr<TableList>& list, LookupLists lookups, bool concat,
                                       int64_t training, const c10::intrusive_ptr<Exchange>& exchange,
                                       double gradient_scale);

}  // namespace sok_torch
