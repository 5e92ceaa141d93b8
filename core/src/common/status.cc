// SPDX-License-Identifier: Apache-2.0
#include "common/status.h"

#include <cstring>
#include <exception>
#include <new>

namespace sok {
namespace {

// Plain bytes: nothing to construct or destroy, so threads may come and go freely.
constexpr size_t kMessageSize = 1024;
thread_local char last_message[kMessageSize] = {0};

}  // namespace

int set_last_error(sok_status code, const char* message) noexcept {
  size_t size = std::strlen(message);
  if (size >= kMessageSize) {
    size = kMessageSize - 1;
    while (size > 0 && (static_cast<unsigned char>(message[size]) & 0xC0) == 0x80) --size;  // whole UTF-8 characters
  }
  std::memcpy(last_message, message, size);
  last_message[size] = '\0';
  return code;
}

int set_last_error_from_exception(const char* function) noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return set_last_error(error.code(), error.message().c_str());
  } catch (const std::bad_alloc&) {
    return set_last_error(SOK_RESOURCE_EXHAUSTED, "out of host memory");
  } catch (const std::exception& error) {
    try {
      return set_last_error(SOK_INTERNAL, (std::string(function) + ": " + error.what()).c_str());
    } catch (...) {
      return set_last_error(SOK_INTERNAL, function);
    }
  } catch (...) {
    return set_last_error(SOK_INTERNAL, function);
  }
}

}  // namespace sok

extern "C" const char* sok_last_error_message(void) { return sok::last_message; }

extern "C" const char* sok_status_name(int status) {
  switch (status) {
    case SOK_OK:
      return "SOK_OK";
    case SOK_INVALID_ARGUMENT:
      return "SOK_INVALID_ARGUMENT";
    case SOK_OUT_OF_RANGE:
      return "SOK_OUT_OF_RANGE";
    case SOK_RESOURCE_EXHAUSTED:
      return "SOK_RESOURCE_EXHAUSTED";
    case SOK_FAILED_PRECONDITION:
      return "SOK_FAILED_PRECONDITION";
    case SOK_UNIMPLEMENTED:
      return "SOK_UNIMPLEMENTED";
    case SOK_UNAVAILABLE:
      return "SOK_UNAVAILABLE";
    case SOK_INTERNAL:
      return "SOK_INTERNAL";
    default:
      return "unknown status";
  }
}
