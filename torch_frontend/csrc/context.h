// SPDX-License-Identifier: Apache-2.0
// The core's execution context over PyTorch's threads, allocators and streams.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

#include "sok/context.h"

namespace sok_torch {

// Threads are at::parallel_for's, temporary memory comes from the device's allocator (CUDA: the caching allocator) and
// the stream is the device's current one. Made for one op call; the device is the current one while it lives.
class Context {
 public:
  explicit Context(c10::Device device);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const sok_context* get() const { return &context_; }

 private:
  c10::DeviceGuard guard_;
  sok_context context_;
};

}  // namespace sok_torch
