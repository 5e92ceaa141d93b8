// SPDX-License-Identifier: Apache-2.0
// Addresses of a CUDA device and memory behind them apart from each other, for code that is compiled without CUDA's
// headers. The device is the current one. Each function throws Error unless it is noexcept.
#ifndef SOK_CUDA_VIRTUAL_MEMORY_H_
#define SOK_CUDA_VIRTUAL_MEMORY_H_

#include <cstdint>

namespace sok::cuda {

// What memory comes in multiples of. Starts CUDA on the device.
int64_t memory_granularity(int32_t device);

// nullptr: so many are not free.
void* reserve_addresses(int64_t bytes);
void free_addresses(void* begin, int64_t bytes) noexcept;

enum class Memory {
  kDevice,
  kHost,  // page-locked, of the part of the host that is next to the device
};

// Puts memory behind addresses. False, with nothing changed: there is none.
bool map_memory(Memory kind, int32_t device, void* begin, int64_t bytes);
// Gives it back; begin and bytes are those of one call of map_memory.
void unmap_memory(void* begin, int64_t bytes);

struct DeviceMemory {
  int64_t free, total;  // bytes
};
DeviceMemory device_memory();

}  // namespace sok::cuda

#endif  // SOK_CUDA_VIRTUAL_MEMORY_H_
