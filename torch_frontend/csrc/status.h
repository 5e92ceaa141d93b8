// SPDX-License-Identifier: Apache-2.0
// Calls of the core: as ranges of PyTorch's profiler, and from a sok_status to the exception that Python sees.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

namespace sok_torch {

// Returns when `status` is SOK_OK; else throws the exception of that code with the core's message: ValueError
// (SOK_INVALID_ARGUMENT), IndexError (SOK_OUT_OF_RANGE), torch.OutOfMemoryError (SOK_RESOURCE_EXHAUSTED),
// NotImplementedError (SOK_UNIMPLEMENTED), RuntimeError (the others).
void check(int status);

// check() of what the function gives, within a range of PyTorch's profiler that has the stage's name: "sok_route".
//   call  its text, "sok_route(..."
void call_core(const char* call, c10::function_ref<int()> function);

// The same of what may take memory for a dynamic table, which does not come from PyTorch's allocator: where there is
// none left on a GPU, PyTorch gives back what it keeps for tensors to come, and the call is made once more.
void call_growing(c10::Device device, const char* call, c10::function_ref<int()> function);

}  // namespace sok_torch

// SOK_CALL(sok_route(context.get(), ...))
#define SOK_CALL(CALL) ::sok_torch::call_core(#CALL, [&] { return CALL; })
// SOK_CALL_GROWING(device, sok_locate(context.get(), ...))
#define SOK_CALL_GROWING(DEVICE, CALL) ::sok_torch::call_growing(DEVICE, #CALL, [&] { return CALL; })
