// SPDX-License-Identifier: Apache-2.0
#include "support.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "device_errors.h"
#include "gpu.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace sok::tf {
namespace {

using ::tensorflow::DataType;

// One fork and join. Worker numbers are claimed, not assigned: the calling thread takes what the pool does not get to,
// so that a busy pool delays nothing and cannot deadlock. Shared with the pool, whose closures may start after the
// join.
struct Fork {
  Fork(int32_t workers, void (*run)(void*, int32_t), void* data) : num_workers(workers), body(run), argument(data) {}

  void Work() {
    for (;;) {
      const int32_t worker = next.fetch_add(1, std::memory_order_relaxed);
      if (worker >= num_workers) return;
      body(argument, worker);
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == num_workers) {
        std::lock_guard<std::mutex> lock(mutex);
        finished.notify_one();
      }
    }
  }

  void Join() {
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [this] { return done.load(std::memory_order_acquire) == num_workers; });
  }

  const int32_t num_workers;
  void (*const body)(void*, int32_t);
  void* const argument;
  std::atomic<int32_t> next{0};
  std::atomic<int32_t> done{0};
  std::mutex mutex;
  std::condition_variable finished;
};

void Run(void* opaque, int32_t num_workers, void (*body)(void*, int32_t), void* argument) {
  if (num_workers <= 1) {
    if (num_workers == 1) body(argument, 0);
    return;
  }
  auto* pool = static_cast<tsl::thread::ThreadPool*>(opaque);
  auto fork = std::make_shared<Fork>(num_workers, body, argument);
  const int32_t helpers = std::min<int32_t>(num_workers - 1, pool->NumThreads());
  for (int32_t i = 0; i < helpers; ++i) pool->Schedule([fork] { fork->Work(); });
  fork->Work();
  fork->Join();
}

int32_t DtypeOf(DataType type) {
  switch (type) {
    case ::tensorflow::DT_INT32:
      return SOK_INT32;
    case ::tensorflow::DT_INT64:
      return SOK_INT64;
    case ::tensorflow::DT_UINT32:
      return SOK_UINT32;
    case ::tensorflow::DT_UINT64:
      return SOK_UINT64;
    case ::tensorflow::DT_HALF:
      return SOK_FLOAT16;
    case ::tensorflow::DT_DOUBLE:
      return SOK_FLOAT64;
    case ::tensorflow::DT_BFLOAT16:
      return SOK_BFLOAT16;
    default:
      return SOK_FLOAT32;
  }
}

}  // namespace

absl::Status ToStatus(int code, const std::string& message) {
  switch (static_cast<sok_status>(code)) {
    case SOK_OK:
      return absl::OkStatus();
    case SOK_INVALID_ARGUMENT:
    case SOK_OUT_OF_RANGE:
      return absl::InvalidArgumentError(message);
    case SOK_RESOURCE_EXHAUSTED:
      return absl::ResourceExhaustedError(message);
    case SOK_FAILED_PRECONDITION:
      return absl::FailedPreconditionError(message);
    case SOK_UNIMPLEMENTED:
      return absl::UnimplementedError(message);
    case SOK_UNAVAILABLE:
      return absl::UnavailableError(message);
    case SOK_INTERNAL:
      return absl::InternalError(message);
  }
  return absl::InternalError(absl::StrCat("unknown status ", code, " of the core: ", message));
}

absl::Status ToStatus(int code) { return code == SOK_OK ? absl::OkStatus() : ToStatus(code, sok_last_error_message()); }

sok_tensor View(const Tensor& tensor) {
  sok_tensor view = SOK_NO_TENSOR;
  view.data = tensor.NumElements() > 0 ? tensor.data() : nullptr;
  view.dtype = DtypeOf(tensor.dtype());
  view.rank = tensor.dims() == 2 ? 2 : 1;
  view.shape[0] = view.rank == 2 ? tensor.dim_size(0) : tensor.NumElements();
  view.shape[1] = view.rank == 2 ? tensor.dim_size(1) : 1;
  return view;
}

sok_tensor Absent() { return SOK_NO_TENSOR; }

CoreContext::CoreContext(OpKernelContext* ctx) : ctx_(ctx), context_(SOK_CONTEXT_INIT) {
  context_.allocator = {this, Allocate, Release};
  if (OnGpu(ctx)) {
    context_.device = {SOK_CUDA, GpuIndex(ctx)};
    context_.stream = GpuStream(ctx);
    context_.errors = DeviceErrors::Of(ctx)->record();
    return;
  }
  const auto* workers = ctx->device()->tensorflow_cpu_worker_threads();
  if (workers != nullptr && workers->workers != nullptr && workers->num_threads > 1) {
    context_.executor = {workers->workers, workers->num_threads, 0, Run};
  }
}

void* CoreContext::Allocate(void* opaque, size_t bytes) {
  auto* self = static_cast<CoreContext*>(opaque);
  Tensor memory;
  const ::tensorflow::TensorShape shape({static_cast<int64_t>(bytes)});
  if (!self->ctx_->allocate_temp(::tensorflow::DT_UINT8, shape, &memory).ok()) return nullptr;
  void* data = memory.data();
  self->temporaries_.push_back(std::move(memory));
  return data;
}

void CoreContext::Release(void* opaque, void* memory) {
  auto& temporaries = static_cast<CoreContext*>(opaque)->temporaries_;
  const auto found = std::find_if(temporaries.begin(), temporaries.end(),
                                  [memory](const Tensor& tensor) { return tensor.data() == memory; });
  if (found != temporaries.end()) temporaries.erase(found);
}

}  // namespace sok::tf
