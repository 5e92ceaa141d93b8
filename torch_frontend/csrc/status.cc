// SPDX-License-Identifier: Apache-2.0
#include "status.h"

#include <c10/util/Exception.h>

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

}  // namespace sok_torch
