// SPDX-License-Identifier: Apache-2.0
// core/src/cuda/virtual_memory.h over host memory: what a device allocates is a file in memory, which is mapped where
// the device's addresses are. It has a limit, and as the driver it unmaps only what was mapped in one piece.
#include "cuda/virtual_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <map>

#include "common/status.h"

namespace {

constexpr int64_t kPage = int64_t{2} << 20;
int64_t limit = int64_t{1} << 40, used = 0, used_of_host = 0;
std::map<char*, int64_t> mapped;
std::map<char*, sok::cuda::Memory> kinds;

void* map(void* begin, int64_t bytes, int protection, int flags, int file) {
  return mmap(begin, static_cast<size_t>(bytes), protection, flags, file, 0);
}

}  // namespace

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

FAKE_EXPORT void fake_memory_limit(int64_t bytes) { limit = bytes; }
FAKE_EXPORT int64_t fake_memory_used() { return used; }
FAKE_EXPORT int64_t fake_host_memory_used() { return used_of_host; }

namespace sok::cuda {

int64_t memory_granularity(int32_t) { return kPage; }

void* reserve_addresses(int64_t bytes) {
  void* const found = map(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  return found != MAP_FAILED ? found : nullptr;
}

void free_addresses(void* begin, int64_t bytes) noexcept { munmap(begin, static_cast<size_t>(bytes)); }

bool map_memory(Memory kind, int32_t, void* begin, int64_t bytes) {
  SOK_CHECK(bytes % kPage == 0 && used >= 0, "not whole pages");
  if (bytes > limit - used - used_of_host) return false;
  const int file = memfd_create("memory", 0);
  const bool made =
      ftruncate(file, bytes) == 0 && map(begin, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file) == begin;
  close(file);
  if (!made) fail(SOK_INTERNAL, "no memory for the fake device");
  mapped[static_cast<char*>(begin)] = bytes;
  kinds[static_cast<char*>(begin)] = kind;
  (kind == Memory::kHost ? used_of_host : used) += bytes;
  return true;
}

void unmap_memory(void* begin, int64_t bytes) {
  const auto found = mapped.find(static_cast<char*>(begin));
  if (found == mapped.end() || found->second != bytes) fail(SOK_INTERNAL, "this was not mapped as one piece");
  (kinds[static_cast<char*>(begin)] == Memory::kHost ? used_of_host : used) -= bytes;
  mapped.erase(found);
  map(begin, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1);
}

DeviceMemory device_memory() { return {limit - used, limit}; }

}  // namespace sok::cuda
