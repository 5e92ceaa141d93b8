// SPDX-License-Identifier: Apache-2.0
#include "sok/device.h"

#include <cstddef>
#include <cstring>
#include <string_view>

#include "common/status.h"
#ifdef SOK_WITH_CUDA
#include "cuda/device.h"
#endif

extern "C" int sok_built_with_cuda(void) {
#ifdef SOK_WITH_CUDA
  return 1;
#else
  return 0;
#endif
}

extern "C" int sok_cuda_device_count(int32_t* count) {
  return sok::guarded(__func__, [&] {
    SOK_CHECK(count != nullptr, "count is NULL");
#ifdef SOK_WITH_CUDA
    *count = sok::cuda::device_count();
#else
    *count = 0;
#endif
  });
}

extern "C" int sok_device_get_properties(sok_device device, sok_device_properties* properties) {
  return sok::guarded(__func__, [&] {
    SOK_CHECK(properties != nullptr, "properties is NULL");
    SOK_CHECK(properties->struct_size >= sizeof(sok_device_properties),
              "struct_size of sok_device_properties is ", properties->struct_size, ", not ",
              sizeof(sok_device_properties));
    if (device.type == SOK_CPU) {
      SOK_CHECK(device.index == 0, "there is no CPU ", device.index, ": all cores are CPU 0");
      const std::string_view name = sok::instruction_set_name();
      sok_device_properties found = {properties->struct_size, {}, 0, 0, 0};
      std::memcpy(found.name, name.data(), name.size());
      *properties = found;
      return;
    }
    SOK_CHECK(device.type == SOK_CUDA, "unknown device type ", device.type);
#ifdef SOK_WITH_CUDA
    const int32_t count = sok::cuda::device_count();
    SOK_CHECK(device.index >= 0 && device.index < count, "no CUDA device ", device.index, "; this host has ", count);
    sok::cuda::get_device_properties(device.index, properties);
#else
    sok::fail(SOK_UNIMPLEMENTED, "this libsok_core was built without CUDA; build it where nvcc is, with SOK_WITH_CUDA=1");
#endif
  });
}
