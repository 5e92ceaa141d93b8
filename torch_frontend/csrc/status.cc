// SPDX-License-Identifier: Apache-2.0
#include "status.h"

#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <string_view>

#include "sok/status.h"

namespace sok_torch {

void check(int status) {
  if (status == SOK_OK) return;
  const char* message = sok_last_error_message();
  const char* name = sok_status_name(status);
  switch (static_cast<sok_status>(status)) {
    case SOK_OK:
      return;
    case SOK_INVALID_ARGUMENT:
      TORCH_CHECK_VALUE(false, message);
      break;
    case SOK_OUT_OF_RANGE:
      TORCH_CHECK_INDEX(false, message);
      break;
    case SOK_RESOURCE_EXHAUSTED:
      TORCH_CHECK_WITH(OutOfMemoryError, false, message);
      break;
    case SOK_UNIMPLEMENTED:
      TORCH_CHECK_NOT_IMPLEMENTED(false, message);
      break;
    case SOK_FAILED_PRECONDITION:
    case SOK_UNAVAILABLE:
    case SOK_INTERNAL:
      TORCH_CHECK(false, message, " (", name, ")");
      break;
  }
  TORCH_CHECK(false, "libsok_core returned status ", status, ", which this frontend does not know: ", message);
}

void call_core(const char* call, c10::function_ref<int()> function) {
  at::RecordFunction range(at::RecordScope::FUNCTION);
  if (range.isActive()) {
    const std::string_view text(call);
    range.before(text.substr(0, text.find('(')));
  }
  check(function());
}

void call_growing(c10::Device device, const char* call, c10::function_ref<int()> function) {
  if (!device.is_cuda()) return call_core(call, function);
  call_core(call, [&]() -> int {
    const int status = function();
    auto* const cache = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
    if (status != SOK_RESOURCE_EXHAUSTED || cache == nullptr) return status;
    cache->emptyCache();
    const int again = function();
    TORCH_CHECK_WITH(OutOfMemoryError, again != SOK_RESOURCE_EXHAUSTED, sok_last_error_message(),
                     "; PyTorch has given back what it kept for tensors to come, and what tensors hold cannot be a "
                     "table's: torch.cuda.set_per_process_memory_fraction() leaves tables a share of the device");
    return again;
  });
}

}  // namespace sok_torch
