// SPDX-License-Identifier: Apache-2.0
// The core's execution context over PyTorch's threads, allocators and streams.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

#include "sok/context.h"

namespace sok_torch {

// What an op does about errors that a CUDA device found in earlier calls and that nobody has raised yet.
enum class Earlier {
  kRaised,  // raises them before anything else
  kLeft     // leaves them: the op stands where one rank must not fail alone (sok.lookup_sparse raises them on all)
};

// Threads are at::parallel_for's, temporary memory comes from the device's allocator (CUDA: the caching allocator) and
// the stream is the device's current one. What CUDA calls find wrong goes to the device's error record. Made for one op
// call; the device is the current one while it lives.
class Context {
 public:
  explicit Context(c10::Device device, Earlier earlier = Earlier::kLeft);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const sok_context* get() const { return &context_; }
  c10::Device device() const { return guard_.current_device(); }

 private:
  c10::DeviceGuard guard_;
  sok_context context_;
};

}  // namespace sok_torch
