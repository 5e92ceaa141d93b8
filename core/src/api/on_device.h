// SPDX-License-Identifier: Apache-2.0
// What entry points do that make and destroy something on a device.
#ifndef SOK_API_ON_DEVICE_H_
#define SOK_API_ON_DEVICE_H_

#include "common/status.h"
#include "sok/types.h"

#ifdef SOK_WITH_CUDA
#include "cuda/runtime.h"
#endif

namespace sok {

// That `device`, config.device in messages, can be there at all.
inline void check_device(sok_device device) {
  SOK_CHECK(device.type == SOK_CPU || device.type == SOK_CUDA, "config.device.type is ", device.type,
            ", must be SOK_CPU or SOK_CUDA");
  SOK_CHECK(device.type == SOK_CUDA || device.index == 0, "there is no CPU device ", device.index);
}

// Calls body() with `device` as the current one.
template <typename Body>
void on_device(sok_device device, Body&& body) {
#ifdef SOK_WITH_CUDA
  if (device.type == SOK_CUDA) {
    const cuda::CurrentDevice current(device.index);
    return body();
  }
#endif
  SOK_CHECK_STATUS(SOK_UNIMPLEMENTED, device.type == SOK_CPU, "CUDA device ", device.index,
                   " was asked for, but this library was built without CUDA");
  body();
}

}  // namespace sok

#endif  // SOK_API_ON_DEVICE_H_
