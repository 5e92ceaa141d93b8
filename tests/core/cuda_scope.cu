// SPDX-License-Identifier: Apache-2.0
// Program of test_cuda_scope.py: what cuda::Scope promises, on a real device. Ends with status 0 and "ok".
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "common/memory.h"
#include "common/status.h"
#include "cuda/context.h"
#include "cuda/device.h"

#define EXPECT(condition)                                                          \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

namespace {

// A caller's allocator that counts.
struct Counter {
  int allocated = 0, released = 0;
};

void* allocate(void* opaque, size_t bytes) {
  ++static_cast<Counter*>(opaque)->allocated;
  void* memory = nullptr;
  return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : nullptr;
}

void release(void* opaque, void* memory) {
  ++static_cast<Counter*>(opaque)->released;
  cudaFree(memory);
}

sok_context context_on(int device, cudaStream_t stream) {
  sok_context context = SOK_CONTEXT_INIT;
  context.device = {SOK_CUDA, device};
  context.stream = stream;
  return context;
}

void default_allocator_is_ordered_by_the_stream() {
  cudaStream_t stream;
  EXPECT(cudaStreamCreate(&stream) == cudaSuccess);
  const std::vector<int> ones(1 << 20, 1);
  std::vector<int> read(ones.size());
  {
    sok::cuda::Scope scope(context_on(0, stream));
    EXPECT(scope.stream() == stream);
    sok::Buffer<int> first(scope.context(), static_cast<int64_t>(ones.size()));
    EXPECT(reinterpret_cast<uintptr_t>(first.data()) % 256 == 0);
    const size_t bytes = ones.size() * sizeof(int);
    EXPECT(cudaMemcpyAsync(first.data(), ones.data(), bytes, cudaMemcpyDefault, stream) == cudaSuccess);
    EXPECT(cudaMemcpyAsync(read.data(), first.data(), bytes, cudaMemcpyDefault, stream) == cudaSuccess);
  }  // released while the copies may still be under way
  EXPECT(cudaStreamSynchronize(stream) == cudaSuccess);
  EXPECT(read == ones);
  EXPECT(cudaStreamDestroy(stream) == cudaSuccess);
}

void callers_allocator_is_used() {
  Counter counter;
  sok_context context = context_on(0, nullptr);
  context.allocator = {&counter, allocate, release};
  {
    sok::cuda::Scope scope(context);
    sok::Buffer<float> buffer(scope.context(), 100);
    EXPECT(counter.allocated == 1 && counter.released == 0);
  }
  EXPECT(counter.released == 1);
}

void too_much_memory_is_an_error_and_leaves_none_behind() {
  sok::cuda::Scope scope(context_on(0, nullptr));
  sok_status code = SOK_OK;
  try {
    sok::Buffer<char> buffer(scope.context(), int64_t{1} << 50);
  } catch (const sok::Error& error) {
    code = error.code();
  }
  EXPECT(code == SOK_RESOURCE_EXHAUSTED);
  EXPECT(cudaGetLastError() == cudaSuccess);
}

void device_that_is_not_there() {
  sok_status code = SOK_OK;
  try {
    sok::cuda::Scope scope(context_on(sok::cuda::device_count(), nullptr));
  } catch (const sok::Error& error) {
    code = error.code();
  }
  EXPECT(code == SOK_INVALID_ARGUMENT);
}

void thread_gets_its_device_back() {
  const int last = sok::cuda::device_count() - 1;
  EXPECT(cudaSetDevice(0) == cudaSuccess);
  int inside = -1, after = -1;
  {
    sok::cuda::Scope scope(context_on(last, nullptr));
    EXPECT(cudaGetDevice(&inside) == cudaSuccess);
  }
  EXPECT(cudaGetDevice(&after) == cudaSuccess);
  EXPECT(inside == last && after == 0);
}

}  // namespace

int main() {
  default_allocator_is_ordered_by_the_stream();
  callers_allocator_is_used();
  too_much_memory_is_an_error_and_leaves_none_behind();
  device_that_is_not_there();
  thread_gets_its_device_back();
  std::puts("ok");
}
