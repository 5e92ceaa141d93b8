// SPDX-License-Identifier: Apache-2.0
// What the running backward() does with the leaves of tables: the nodes of autograd that add to their .grad.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

namespace sok_torch {

// Whether autograd has to carry the gradient of a table itself: somebody waits for it on the way (hooks), or takes it
// away (autograd.grad()), or it is not wanted. For the backward() of a node that has the table among its inputs.
bool carried(const at::Tensor& table);

// Whether these edges of the node that runs now are the only way to where they lead, in a backward() to all leaves, so
// that what gets no gradient through them gets none at all.
bool nothing_else_leads_to(const torch::autograd::edge_list& edges);

}  // namespace sok_torch
