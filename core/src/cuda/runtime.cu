// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime.h"

#include <cstdio>

#include "cuda/check.h"
#include "cuda/context.h"
#include "cuda/device.h"

namespace sok::cuda {
namespace {

// Of what was asked about with `status`.
bool is_over(cudaError_t status) {
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  SOK_CUDA_CHECK(status);
  return true;
}

}  // namespace

CurrentDevice::CurrentDevice(int32_t device) : device_(device) {
  SOK_CHECK(device >= 0 && device < device_count(), "no CUDA device ", device, "; this host has ", device_count());
  SOK_CUDA_CHECK(cudaGetDevice(&previous_));
  if (device_ != previous_) SOK_CUDA_CHECK(cudaSetDevice(device_));
}

CurrentDevice::~CurrentDevice() {
  if (device_ != previous_) cudaSetDevice(previous_);
}

sok_context with_allocator(const sok_context& context) { return Scope(context).context(); }

void enter_watching_thread(int32_t device) {
  SOK_CUDA_CHECK(cudaSetDevice(device));
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  SOK_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
}

std::string device_uuid(int32_t device) {
  SOK_CHECK(device >= 0 && device < device_count(), "no CUDA device ", device, "; this host has ", device_count());
  cudaDeviceProp found;
  SOK_CUDA_CHECK(cudaGetDeviceProperties(&found, device));
  std::string text;
  for (const char byte : found.uuid.bytes) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char>(byte));
    text += digits;
  }
  return text;
}

int num_multiprocessors() {
  int device = 0, multiprocessors = 0;
  SOK_CUDA_CHECK(cudaGetDevice(&device));
  SOK_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return multiprocessors;
}

void* create_stream() {
  cudaStream_t stream = nullptr;
  SOK_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

void destroy_stream(void* stream) noexcept { cudaStreamDestroy(static_cast<cudaStream_t>(stream)); }

void* allocate(size_t bytes) {
  void* memory = nullptr;
  SOK_CUDA_CHECK(cudaMalloc(&memory, bytes));
  return memory;
}

void release(void* memory) noexcept { cudaFree(memory); }

void* allocate_page_locked(size_t bytes) {
  void* memory = nullptr;
  SOK_CUDA_CHECK(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable));
  return memory;
}

void release_page_locked(void* memory) noexcept { cudaFreeHost(memory); }

void* create_event() {
  cudaEvent_t event = nullptr;
  SOK_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

void destroy_event(void* event) noexcept { cudaEventDestroy(static_cast<cudaEvent_t>(event)); }

void record_event(void* event, void* stream) {
  SOK_CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)));
}

bool is_done(void* event) { return is_over(cudaEventQuery(static_cast<cudaEvent_t>(event))); }

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  SOK_CUDA_CHECK(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status));
  return status != cudaStreamCaptureStatusNone;
}

void wait(void* stream) { SOK_CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(stream))); }

void wait_for_event(void* event) { SOK_CUDA_CHECK(cudaEventSynchronize(static_cast<cudaEvent_t>(event))); }

void make_wait(void* stream, void* event) {
  SOK_CUDA_CHECK(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0));
}

void copy(void* to, const void* from, size_t bytes, void* stream) {
  SOK_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
}

bool is_idle(void* stream) { return is_over(cudaStreamQuery(static_cast<cudaStream_t>(stream))); }

}  // namespace sok::cuda
