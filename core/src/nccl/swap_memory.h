// SPDX-License-Identifier: Apache-2.0
// What a swap of counts works in: made once, so that a step allocates nothing.
#ifndef SOK_NCCL_SWAP_MEMORY_H_
#define SOK_NCCL_SWAP_MEMORY_H_

#include <cstddef>
#include <cstdint>

namespace sok::nccl {

// On the current device. One swap uses it at a time, and has waited for the device when the next one begins.
class SwapMemory {
 public:
  SwapMemory() = default;
  ~SwapMemory();
  SwapMemory(const SwapMemory&) = delete;
  SwapMemory& operator=(const SwapMemory&) = delete;

  // Makes room for messages of `cells` numbers, once. Throws Error.
  void make(int64_t cells);

  // Leaves it to work that may never end, for as long as the process lives.
  void abandon() { host_ = device_ = nullptr; }

  int64_t* results() const { return host_; }     // [2 * cells], page-locked
  int64_t* messages() const { return device_; }  // [2 * cells] on the device

 private:
  int64_t *host_ = nullptr, *device_ = nullptr;
};

}  // namespace sok::nccl

#endif  // SOK_NCCL_SWAP_MEMORY_H_
