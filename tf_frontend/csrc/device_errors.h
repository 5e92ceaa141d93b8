// SPDX-License-Identifier: Apache-2.0
// What the kernels of the core find wrong on a GPU: the core's error record of each GPU, and when an op raises from it.
//
// Ops on a GPU return before it has looked at the keys. What it finds there is written to the record of that GPU, and
// until an op has raised it no update of a table with this record takes place. Where one process holds the tables, ops
// that use them look into the record first, which costs a read of host memory. Where several share them no op but
// SokExchangeSizes may fail alone: the others would wait for this process.
#ifndef SOK_TENSORFLOW_DEVICE_ERRORS_H_
#define SOK_TENSORFLOW_DEVICE_ERRORS_H_

#include <atomic>
#include <cstdint>
#include <mutex>

#include "support.h"

namespace sok::tf {

// Of one GPU, shared by all ops of the process. Made at the first use of the GPU and never destroyed: work that writes
// to the record may be pending when the process ends.
class DeviceErrors {
 public:
  // Of the GPU that `ctx` runs on; nullptr on the CPU.
  static DeviceErrors* Of(OpKernelContext* ctx);

  explicit DeviceErrors(int gpu);
  DeviceErrors(const DeviceErrors&) = delete;
  DeviceErrors& operator=(const DeviceErrors&) = delete;

  // For sok_context.errors. NULL when it could not be made: each call then waits and reports at once.
  sok_error_record* record() const { return record_; }

  // The error of what the GPU has found so far, and empties the record. Does not wait unless something was found: then
  // it waits for the work that was enqueued before, which must still meet the full record. The other ops of the same
  // step fail likewise.
  absl::Status Check(OpKernelContext* ctx);

 private:
  sok_error_record* record_ = nullptr;
  std::mutex mutex_;
  std::atomic<int64_t> failed_step_{0};
  absl::Status failure_;
};

// The two functions below do nothing on the CPU, where the core raises errors itself.

// DeviceErrors::Check of the op's GPU.
absl::Status CheckDevice(OpKernelContext* ctx);

// The same after all work of the GPU has been waited for.
absl::Status WaitAndCheckDevice(OpKernelContext* ctx);

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_DEVICE_ERRORS_H_
