// SPDX-License-Identifier: Apache-2.0
// From a sok_status to the exception that Python sees.
#pragma once

namespace sok_torch {

// Returns when `status` is SOK_OK; else throws the exception of that code with the core's message: ValueError
// (SOK_INVALID_ARGUMENT), IndexError (SOK_OUT_OF_RANGE), torch.OutOfMemoryError (SOK_RESOURCE_EXHAUSTED),
// NotImplementedError (SOK_UNIMPLEMENTED), RuntimeError (the others).
void check(int status);

}  // namespace sok_torch
