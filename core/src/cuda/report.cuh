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

// The loop is a loop and the pieces lie in memory so that this takes few registers: a kernel has those of the functions
// that it calls too.
__device__ __noinline__ inline void write_finding(CallErrors errors, uint32_t rank, const uint32_t* pieces) {
  sok_error_record* const record = errors.record;
  const uint32_t first = atomicCAS(&record->call, 0u, errors.call);
  if (first != 0 && first != errors.call) return;
  if (*static_cast<const volatile uint64_t*>(&record->pieces[0]) >> 32 >= rank) return;
#pragma unroll 1
  for (int i = 0; i < kFindingPieces; ++i) {
    atomicMax(reinterpret_cast<unsigned long long*>(&record->pieces[i]), static_cast<uint64_t>(rank) << 32 | pieces[i]);
  }
  __threadfence_system();
  *static_cast<volatile int32_t*>(&record->fault) = static_cast<int32_t>(pieces[0]);
}

// Of the threads of a call that find something wrong the one with the lowest `place` describes it. Places are numbers
// that the call gives to whatever may be wrong, each to one thing alone: threads that report the same place report the
// same. Nobody waits for anybody. `fault` of the record is written last, for the host and for later kernels.
__device__ __forceinline__ void report(CallErrors errors, Fault fault, int32_t table, int64_t place, int64_t value,
                                       int64_t limit) {
  const uint32_t pieces[kFindingPieces] = {
      static_cast<uint32_t>(fault), static_cast<uint32_t>(table),
      static_cast<uint32_t>(value), static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32),
      static_cast<uint32_t>(limit), static_cast<uint32_t>(static_cast<uint64_t>(limit) >> 32)};
  write_finding(errors, UINT32_MAX - static_cast<uint32_t>(min(place, int64_t{UINT32_MAX} - 1)), pieces);
}

// The record of one call: the caller's, or one in device memory that `finish` reads after waiting for the stream.
class Report {
 public:
  explicit Report(const Scope& scope);
  sok_error_record* record() const { return record_; }
  CallErrors errors() const { return {record_, call_}; }

  // Throws what was found by a call that has no record of the caller's. Names come from `tables`.
  void finish(const std::vector<Table>& tables) const;
  void finish(const Table& table) const;
  void finish() const;

 private:
  Finding read() const;

  const Scope& scope_;
  Buffer<sok_error_record> own_;
  sok_error_record* record_;
  uint32_t call_ = 1;
};

}  // namespace sok::cuda

#endif  // SOK_CUDA_REPORT_CUH_
