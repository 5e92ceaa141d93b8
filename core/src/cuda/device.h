// SPDX-License-Identifier: Apache-2.0
// CUDA devices, for code that is compiled without CUDA's headers. Only declared where SOK_WITH_CUDA is set.
#ifndef SOK_CUDA_DEVICE_H_
#define SOK_CUDA_DEVICE_H_

#include <cstdint>

#include "sok/device.h"

namespace sok::cuda {

// 0 without a driver or a GPU. Makes no context. Throws Error(SOK_UNAVAILABLE) when the driver is there but does not
// answer (in a child of fork() after the parent used CUDA, for example).
int32_t device_count();

// Fills all fields but struct_size. Makes no context. `index` must be below device_count().
void get_device_properties(int32_t index, sok_device_properties* properties);

// "CUDA 13.0, sm 90 100"; a static string.
const char* build_info();

}  // namespace sok::cuda

#endif  // SOK_CUDA_DEVICE_H_
