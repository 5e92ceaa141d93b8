// SPDX-License-Identifier: Apache-2.0
// Errors inside the library are exceptions of type Error; none crosses the C interface (guarded()).
#ifndef SOK_COMMON_STATUS_H_
#define SOK_COMMON_STATUS_H_

#include <locale>
#include <sstream>
#include <string>
#include <utility>

#include "sok/status.h"

namespace sok {

class Error {
 public:
  Error(sok_status code, std::string message) : code_(code), message_(std::move(message)) {}
  sok_status code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  sok_status code_;
  std::string message_;
};

// Keeps the message for sok_last_error_message and returns `code`. Never throws or allocates.
int set_last_error(sok_status code, const char* message) noexcept;

// Turns the exception in flight into a status and the thread's message. `function` names the entry.
int set_last_error_from_exception(const char* function) noexcept;

template <typename... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(sok_status code, const Parts&... parts) {
  std::ostringstream stream;
  stream.imbue(std::locale::classic());  // numbers as they are, whatever the application's locale
  (stream << ... << parts);
  throw Error(code, stream.str());
}

// The wrapper of every exported function: runs `body`, which returns nothing and throws on failure.
template <typename Body>
int guarded(const char* function, Body&& body) noexcept {
  try {
    body();
    return SOK_OK;
  } catch (...) {
    return set_last_error_from_exception(function);
  }
}

}  // namespace sok

// SOK_CHECK(condition, parts of the message...): the caller's mistake.
#define SOK_CHECK_STATUS(code, condition, ...) \
  do {                                         \
    if (!(condition)) [[unlikely]]             \
      ::sok::fail((code), __VA_ARGS__);        \
  } while (false)
#define SOK_CHECK(condition, ...) SOK_CHECK_STATUS(SOK_INVALID_ARGUMENT, condition, __VA_ARGS__)

#define SOK_ENTRY(...) ::sok::guarded(__func__, [&]() __VA_ARGS__)

#endif  // SOK_COMMON_STATUS_H_
