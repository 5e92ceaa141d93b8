// SPDX-License-Identifier: Apache-2.0
// Entry points of sok/batch_memory.h.
#include "sok/batch_memory.h"

#include <memory>

#include "common/call.h"
#include "common/status.h"

#ifdef SOK_WITH_CUDA
#include "cuda/batch_memory.h"
#include "cuda/runtime.h"
#endif

using namespace sok;  // NOLINT: entry points only

#ifdef SOK_WITH_CUDA
struct sok_batch_memory {
  explicit sok_batch_memory(int32_t device) : impl(device) {}
  cuda::BatchMemory impl;
};
#else
namespace {

[[noreturn]] void fail_without_cuda() {
  fail(SOK_UNIMPLEMENTED,
       "memory for batches is a GPU's, and this libsok_core was built without CUDA; build it where nvcc is, with "
       "SOK_WITH_CUDA=1");
}

}  // namespace
#endif

extern "C" int sok_batch_memory_create(sok_device device, sok_batch_memory** memory) {
  return SOK_ENTRY({
    SOK_CHECK(memory != nullptr, "memory is NULL");
    SOK_CHECK(device.type == SOK_CUDA, "device.type is ", device.type, ", must be SOK_CUDA");
#ifdef SOK_WITH_CUDA
    const cuda::CurrentDevice current(device.index);
    *memory = std::make_unique<sok_batch_memory>(device.index).release();
#else
    fail_without_cuda();
#endif
  });
}

extern "C" int sok_batch_memory_fill(sok_batch_memory* memory, const void* host, int64_t bytes, void** data) {
  return SOK_ENTRY({
    SOK_CHECK(memory != nullptr, "memory is NULL");
    SOK_CHECK(host != nullptr, "host is NULL");
    SOK_CHECK(data != nullptr, "data is NULL");
    SOK_CHECK(bytes > 0, "bytes is ", bytes, ", must be above 0");
#ifdef SOK_WITH_CUDA
    const cuda::CurrentDevice current(memory->impl.device());
    *data = memory->impl.fill(host, static_cast<size_t>(bytes));
#else
    fail_without_cuda();
#endif
  });
}

extern "C" int sok_batch_memory_release(sok_batch_memory* memory, void* data, void* stream) {
  return SOK_ENTRY({
    SOK_CHECK(memory != nullptr, "memory is NULL");
#ifdef SOK_WITH_CUDA
    const cuda::CurrentDevice current(memory->impl.device());
    memory->impl.release(data, stream);
#else
    static_cast<void>(data), static_cast<void>(stream);
    fail_without_cuda();
#endif
  });
}

extern "C" int sok_batch_memory_destroy(sok_batch_memory* memory) {
  return SOK_ENTRY({
    if (memory == nullptr) return;
#ifdef SOK_WITH_CUDA
    const cuda::CurrentDevice current(memory->impl.device());
    delete memory;
#else
    fail_without_cuda();
#endif
  });
}
