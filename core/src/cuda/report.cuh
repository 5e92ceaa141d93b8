// SPDX-License-Identifier: Apache-2.0
// How kernels say what they found wrong, and how a call without an error record hears of it.
#ifndef SOK_CUDA_REPORT_CUH_
#define SOK_CUDA_REPORT_CUH_

#include <vector>

#include "common/call.h"
#include "common/error_record.h"
#include "common/memory.h"
#include "cuda/check.h"
#include "cuda/context.h"

namespace sok::cuda {

// The first thread of the device to find something describes it; the fault itself is written last, for the host.
__device__ __noinline__ inline void report(sok_error_record* record, Fault fault, int32_t table, int64_t value,
                                           int64_t limit) {
  if (atomicCAS(&record->claimed, 0, 1) != 0) return;
  record->table = table;
  record->value = value;
  record->limit = limit;
  __threadfence_system();
  *static_cast<volatile int32_t*>(&record->fault) = static_cast<int32_t>(fault);
}

// The record of one call: the caller's, or one in device memory that `finish` reads after waiting for the stream.
class Report {
 public:
  explicit Report(const Scope& scope);
  sok_error_record* record() const { return record_; }

  // Throws what was found by a call that has no record of the caller's. Names come from `tables`.
  void finish(const std::vector<Table>& tables) const;
  void finish(const Table& table) const;
  void finish() const;

 private:
  sok_error_record read() const;

  const Scope& scope_;
  Buffer<sok_error_record> own_;
  sok_error_record* record_;
};

}  // namespace sok::cuda

#endif  // SOK_CUDA_REPORT_CUH_
