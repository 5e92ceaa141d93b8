// SPDX-License-Identifier: Apache-2.0
#include "nccl/library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "common/status.h"

namespace sok::nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr const char* kRemedy =
    "install one (python -m pip install nvidia-nccl-cu13, or -cu12 for CUDA 12, or the system's libnccl2), or name its "
    "file in SOK_NCCL_LIBRARY";

void* open_library() {
  // Never closed: NCCL has threads of its own.
  if (const char* path = std::getenv("SOK_NCCL_LIBRARY"); path != nullptr && *path != '\0') {
    void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) fail(SOK_UNAVAILABLE, "SOK_NCCL_LIBRARY names no library that can be opened: ", dlerror());
    return handle;
  }
  void* handle = dlopen(kName, RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) handle = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) fail(SOK_UNAVAILABLE, "NCCL was not found (", dlerror(), "); ", kRemedy);
  return handle;
}

template <typename Function>
void find(void* handle, const char* name, const std::string& path, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(handle, name));
  if (*function == nullptr) fail(SOK_UNAVAILABLE, path, " has no ", name, "; ", kRemedy);
}

Library load() {
  void* handle = open_library();
  Library result;
  result.path = kName;
  find(handle, "ncclGetVersion", result.path, &result.get_version);
  Dl_info where = {};
  if (dladdr(reinterpret_cast<void*>(result.get_version), &where) != 0 && where.dli_fname != nullptr) {
    result.path = where.dli_fname;
  }
  const Result status = result.get_version(&result.version);
  if (status != kSuccess || result.version < kMinVersion) {
    fail(SOK_UNAVAILABLE, result.path, " is NCCL ", version_text(result.version), ", ", version_text(kMinVersion),
         " or newer is needed; ", kRemedy);
  }
  find(handle, "ncclGetUniqueId", result.path, &result.get_unique_id);
  find(handle, "ncclCommInitRankConfig", result.path, &result.comm_init_rank_config);
  find(handle, "ncclCommDestroy", result.path, &result.comm_destroy);
  find(handle, "ncclCommAbort", result.path, &result.comm_abort);
  find(handle, "ncclCommGetAsyncError", result.path, &result.comm_get_async_error);
  find(handle, "ncclGroupStart", result.path, &result.group_start);
  find(handle, "ncclGroupEnd", result.path, &result.group_end);
  find(handle, "ncclSend", result.path, &result.send);
  find(handle, "ncclRecv", result.path, &result.recv);
  find(handle, "ncclAllReduce", result.path, &result.all_reduce);
  find(handle, "ncclGetErrorString", result.path, &result.get_error_string);
  find(handle, "ncclGetLastError", result.path, &result.get_last_error);
  return result;
}

}  // namespace

std::string Library::describe(Result result) const {
  std::string text = std::string(get_error_string(result)) + " (" + std::to_string(result) + ")";
  // For the whole process; may be about an older error, and is empty where NCCL said nothing.
  const char* last = get_last_error(nullptr);
  if (last != nullptr && *last != '\0') text += std::string(": ") + last;
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

std::string version_text(int version) {
  // 2.8 and older were numbered in thousands.
  const int major = version >= 10000 ? version / 10000 : version / 1000;
  const int rest = version >= 10000 ? version % 10000 : version % 1000;
  return std::to_string(major) + "." + std::to_string(rest / 100) + "." + std::to_string(rest % 100);
}

}  // namespace sok::nccl
