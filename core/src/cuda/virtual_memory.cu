// SPDX-License-Identifier: Apache-2.0
// Virtual memory management is the driver's alone: its functions are found through the runtime, so that the library
// loads where there is no driver.
#include "cuda/virtual_memory.h"

#include <cuda.h>

#include <algorithm>

#include "cuda/check.h"

namespace sok::cuda {
namespace {

template <typename Function>
void find(const char* name, Function** function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  SOK_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &found, 10020, cudaEnableDefault, &result));
#else
  SOK_CUDA_CHECK(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result));
#endif
  SOK_CHECK_STATUS(SOK_UNAVAILABLE, result == cudaDriverEntryPointSuccess, "the CUDA driver has no ", name,
                   "; a newer one is needed");
  *function = reinterpret_cast<Function*>(found);
}

struct Driver {
  Driver() {
    find("cuDeviceGetAttribute", &get_attribute);
    find("cuGetErrorName", &get_error_name);
    find("cuMemGetAllocationGranularity", &get_granularity);
    find("cuMemAddressReserve", &address_reserve);
    find("cuMemAddressFree", &address_free);
    find("cuMemCreate", &create);
    find("cuMemRelease", &release);
    find("cuMemMap", &map);
    find("cuMemUnmap", &unmap);
    find("cuMemSetAccess", &set_access);
  }

  decltype(cuDeviceGetAttribute)* get_attribute;
  decltype(cuGetErrorName)* get_error_name;
  decltype(cuMemGetAllocationGranularity)* get_granularity;
  decltype(cuMemAddressReserve)* address_reserve;
  decltype(cuMemAddressFree)* address_free;
  decltype(cuMemCreate)* create;
  decltype(cuMemRelease)* release;
  decltype(cuMemMap)* map;
  decltype(cuMemUnmap)* unmap;
  decltype(cuMemSetAccess)* set_access;
};

const Driver& driver() {
  static const Driver found;
  return found;
}

// Whether there was memory for it.
bool check(CUresult result, const char* function) {
  if (result == CUDA_SUCCESS) return true;
  if (result == CUDA_ERROR_OUT_OF_MEMORY) return false;
  const char* name = nullptr;
  driver().get_error_name(result, &name);
  fail(result == CUDA_ERROR_NOT_SUPPORTED ? SOK_UNIMPLEMENTED : SOK_INTERNAL,
       "CUDA: ", name != nullptr ? name : "unknown error", " (", static_cast<int>(result), ") from ", function);
}

int attribute(CUdevice_attribute which, int32_t device) {
  int result = 0;
  check(driver().get_attribute(&result, which, device), "cuDeviceGetAttribute");
  return result;
}

CUmemLocation location_of(Memory kind, int32_t device) {
  if (kind == Memory::kDevice) return {CU_MEM_LOCATION_TYPE_DEVICE, device};
  SOK_CHECK_STATUS(SOK_UNIMPLEMENTED,
                   attribute(CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) != 0,
                   "CUDA device ", device, " cannot have memory of the host behind its addresses, with this driver");
  // -1: a host that is not divided.
  return {CU_MEM_LOCATION_TYPE_HOST_NUMA, std::max(0, attribute(CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device))};
}

CUmemAllocationProp memory_of(CUmemLocation location) {
  CUmemAllocationProp result = {};
  result.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  result.location = location;
  return result;
}

CUdeviceptr address_of(void* begin) { return reinterpret_cast<CUdeviceptr>(begin); }
size_t size(int64_t bytes) { return static_cast<size_t>(bytes); }

}  // namespace

int64_t memory_granularity(int32_t device) {
  SOK_CUDA_CHECK(cudaFree(nullptr));  // the runtime starts the driver
  const CUmemAllocationProp memory = memory_of(location_of(Memory::kDevice, device));
  size_t result = 0;
  check(driver().get_granularity(&result, &memory, CU_MEM_ALLOC_GRANULARITY_MINIMUM), "cuMemGetAllocationGranularity");
  return static_cast<int64_t>(result);
}

void* reserve_addresses(int64_t bytes) {
  CUdeviceptr found = 0;
  const bool free = check(driver().address_reserve(&found, size(bytes), 0, 0, 0), "cuMemAddressReserve");
  return free ? reinterpret_cast<void*>(found) : nullptr;
}

void free_addresses(void* begin, int64_t bytes) noexcept { driver().address_free(address_of(begin), size(bytes)); }

bool map_memory(Memory kind, int32_t device, void* begin, int64_t bytes) {
  const CUmemAllocationProp memory = memory_of(location_of(kind, device));
  CUmemGenericAllocationHandle handle = 0;
  if (!check(driver().create(&handle, size(bytes), &memory, 0), "cuMemCreate")) return false;
  const CUresult mapped = driver().map(address_of(begin), size(bytes), 0, handle, 0);
  driver().release(handle);  // the mapping keeps the memory
  if (!check(mapped, "cuMemMap")) return false;
  const CUmemAccessDesc access = {location_of(Memory::kDevice, device), CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  const CUresult accessible = driver().set_access(address_of(begin), size(bytes), &access, 1);
  if (accessible != CUDA_SUCCESS) driver().unmap(address_of(begin), size(bytes));
  return check(accessible, "cuMemSetAccess");
}

void unmap_memory(void* begin, int64_t bytes) { check(driver().unmap(address_of(begin), size(bytes)), "cuMemUnmap"); }

DeviceMemory device_memory() {
  size_t free = 0, total = 0;
  SOK_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return {static_cast<int64_t>(free), static_cast<int64_t>(total)};
}

}  // namespace sok::cuda
