// SPDX-License-Identifier: Apache-2.0
#include "device_errors.h"

#include <map>

#include "gpu.h"

namespace sok::tf {

DeviceErrors* DeviceErrors::Of(OpKernelContext* ctx) {
  if (!OnGpu(ctx)) return nullptr;
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::map<int, DeviceErrors*>;
  const int gpu = GpuIndex(ctx);
  std::lock_guard<std::mutex> lock(*mutex);
  DeviceErrors*& errors = (*all)[gpu];
  if (errors == nullptr) errors = new DeviceErrors(gpu);
  return errors;
}

DeviceErrors::DeviceErrors(int gpu) {
  if (sok_error_record_create({SOK_CUDA, gpu}, &record_) != SOK_OK) record_ = nullptr;
}

absl::Status DeviceErrors::Check(OpKernelContext* ctx) {
  // Ops that run eagerly all have step 0; what runs after an error there is a new attempt.
  const int64_t step = ctx->step_id();
  const bool found = record_ != nullptr && sok_error_record_is_empty(record_) == 0;
  if (!found && (step == 0 || failed_step_.load(std::memory_order_acquire) != step)) return absl::OkStatus();
  std::lock_guard<std::mutex> lock(mutex_);
  if (record_ != nullptr && sok_error_record_is_empty(record_) == 0) {
    failure_ = ToStatus(sok_error_record_check(record_));
    failed_step_.store(step, std::memory_order_release);
    return failure_;
  }
  return step != 0 && failed_step_.load(std::memory_order_relaxed) == step ? failure_ : absl::OkStatus();
}

absl::Status CheckDevice(OpKernelContext* ctx) {
  DeviceErrors* const errors = DeviceErrors::Of(ctx);
  return errors == nullptr ? absl::OkStatus() : errors->Check(ctx);
}

absl::Status WaitAndCheckDevice(OpKernelContext* ctx) {
  if (!OnGpu(ctx)) return absl::OkStatus();
  TF_RETURN_IF_ERROR(WaitForGpu(ctx));
  return CheckDevice(ctx);
}

}  // namespace sok::tf
