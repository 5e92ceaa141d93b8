// SPDX-License-Identifier: Apache-2.0
// The op `apply`, from whatever its parts are read.
#pragma once

#include <vector>

#include "ops.h"
#include "sok/gradient.h"

namespace sok_torch {

// As the op `apply`; parts: those of the first table, then those of the second, ...
void apply_parts(at::TensorList tables, at::TensorList states, const Names& names, at::IntArrayRef num_states,
                 at::IntArrayRef num_parts, const std::vector<sok_gradient>& parts, at::IntArrayRef kinds,
                 at::IntArrayRef flags, at::ArrayRef<double> settings, at::ArrayRef<double> gradient_scales,
                 at::TensorList stamps, at::IntArrayRef stamped, int64_t stamp);

}  // namespace sok_torch
