// SPDX-License-Identifier: Apache-2.0
#include "nccl/swap_memory.h"

#include "cuda/exchange.h"

namespace sok::nccl {

SwapMemory::~SwapMemory() { free(); }

void SwapMemory::reserve(int64_t cells) {
  if (cells <= capacity_) return;
  free();
  const auto bytes = static_cast<size_t>(cells) * sizeof(int64_t);
  host_ = static_cast<int64_t*>(cuda::allocate_page_locked(3 * bytes));
  device_ = static_cast<int64_t*>(cuda::allocate(2 * bytes));
  capacity_ = cells;
}

void SwapMemory::free() {
  if (host_ != nullptr) cuda::release_page_locked(host_);
  if (device_ != nullptr) cuda::release(device_);
  host_ = device_ = nullptr;
  capacity_ = 0;
}

}  // namespace sok::nccl
