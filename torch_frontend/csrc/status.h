// SPDX-License-Identifier: Apache-2.0
// Calls of the core: as ranges of PyTorch's profiler, and from a sok_status to the exception that Python sees.
#pragma once

#include <c10/util/FunctionRef.h>

namespace sok_torch {

// Returns when `status` is SOK_OK; else throws the exception of that code with the core's message: ValueError
// (SOK_INVALID_ARGUMENT), IndexError (SOK_OUT_OF_RANGE), torch.OutOfMemoryError (SOK_RESOURCE_EXHAUSTED),
// NotImplementedError (SOK_UNIMPLEMENTED), RuntimeError (the others).
void check(int status);

// check() of what the function gives, within a range of PyTorch's profiler that has the stage's name: "sok_route".
//   call  its text, "sok_route(..."
void call_core(const char* call, c10::function_ref<int()> function);

}  // namespace sok_torch

// SOK_CALL(sok_route(context.get(), ...))
#define SOK_CALL(CALL) ::sok_torch::call_core(#CALL, [&] { return CALL; })
