// SPDX-License-Identifier: Apache-2.0
#include "nccl/swap_memory.h"

#include "cuda/runtime.h"

namespace sok::nccl {

SwapMemory::~SwapMemory() {
  if (host_ != nullptr) cuda::release_page_locked(host_);
  if (device_ != nullptr) cuda::release(device_);
}

void SwapMemory::make(int64_t cells) {
  const auto bytes = static_cast<size_t>(cells) * sizeof(int64_t);
  host_ = static_cast<int64_t*>(cuda::allocate_page_locked(2 * bytes));
  device_ = static_cast<int64_t*>(cuda::allocate(2 * bytes));
}

}  // namespace sok::nccl
