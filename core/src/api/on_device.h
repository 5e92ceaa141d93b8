// SPDX-License-Identifier: Apache-2.0
// What is done on a device outside the stages: memory that lasts is taken and given back, temporary memory shared by
// stages.
#ifndef SOK_API_ON_DEVICE_H_
#define SOK_API_ON_DEVICE_H_

#include "common/status.h"
#include "sok/context.h"

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

// The same for a call: body(context) gets one that temporary memory can be taken from.
template <typename Body>
void on_device(const sok_context& context, Body&& body) {
  on_device(context.device, [&]() {
#ifdef SOK_WITH_CUDA
    if (context.device.type == SOK_CUDA) return body(cuda::with_allocator(context));
#endif
    body(context);
  });
}

}  // namespace sok

#endif  // SOK_API_ON_DEVICE_H_
