// SPDX-License-Identifier: Apache-2.0
// Entry points of sok/device.h and sok/version.h.
#include <cstdio>
#include <string>

#include "common/status.h"
#include "cpu/isa.h"
#include "sok/sok.h"

#ifdef SOK_WITH_CUDA
#include "cuda/device.h"
#endif

#ifndef SOK_VERSION_STRING
#error "CMake defines SOK_VERSION_STRING"
#endif

using namespace sok;  // NOLINT: entry points only

extern "C" int sok_abi_version(void) { return SOK_ABI_VERSION; }

extern "C" const char* sok_version(void) { return SOK_VERSION_STRING; }

namespace {

std::string make_build_info() {
  std::string info = "sok " SOK_VERSION_STRING ", ";
#if defined(__clang__)
  info += "Clang " __clang_version__;
#elif defined(__GNUC__)
  info += "GCC " __VERSION__;
#else
  info += "unknown compiler";
#endif
  info += std::string(", ") + cpu::kernels().name + ", ";
#ifdef SOK_WITH_CUDA
  info += cuda::build_info();
#else
  info += "no CUDA";
#endif
  return info;
}

}  // namespace

extern "C" const char* sok_build_info(void) {
  try {
    static const std::string info = make_build_info();
    return info.c_str();
  } catch (...) {
    return "sok " SOK_VERSION_STRING;
  }
}

extern "C" int sok_built_with_cuda(void) {
#ifdef SOK_WITH_CUDA
  return 1;
#else
  return 0;
#endif
}

extern "C" int sok_cuda_device_count(int32_t* count) {
  return SOK_ENTRY({
    SOK_CHECK(count != nullptr, "count is NULL");
#ifdef SOK_WITH_CUDA
    *count = cuda::device_count();
#else
    *count = 0;
#endif
  });
}

extern "C" int sok_device_get_properties(sok_device device, sok_device_properties* properties) {
  return SOK_ENTRY({
    SOK_CHECK(properties != nullptr, "properties is NULL");
    SOK_CHECK(properties->struct_size == sizeof(sok_device_properties), "properties.struct_size is ",
              properties->struct_size, ", must be ", sizeof(sok_device_properties));
    sok_device_properties result = {};
    result.struct_size = sizeof(sok_device_properties);
    if (device.type == SOK_CPU) {
      SOK_CHECK(device.index == 0, "there is no CPU device ", device.index);
      std::snprintf(result.name, sizeof(result.name), "%s", cpu::kernels().name);
    } else {
      SOK_CHECK(device.type == SOK_CUDA, "device.type is ", device.type, ", must be SOK_CPU or SOK_CUDA");
#ifdef SOK_WITH_CUDA
      const int32_t count = cuda::device_count();
      SOK_CHECK(device.index >= 0 && device.index < count, "no CUDA device ", device.index, "; this host has ", count);
      cuda::get_device_properties(device.index, &result);
#else
      fail(SOK_UNIMPLEMENTED, "this libsok_core was built without CUDA; build it where nvcc is, with SOK_WITH_CUDA=1");
#endif
    }
    *properties = result;
  });
}
