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

// Whether somebody has found something. The record may lie in host memory: it is read past the caches, since a kernel
// of another stream may have written it.
__device__ __forceinline__ bool is_recorded(const sok_error_record* errors) {
  return *reinterpret_cast<const volatile uint64_t*>(&errors->taken) != 0;  // with `ended`
}

// Of all threads that report to an empty record the first describes what it has found. No inlining, so that a kernel
// needs few registers for it.
__device__ __noinline__ inline void report(sok_error_record* errors, Fault fault, int32_t table, int64_t value,
                                           int64_t limit) {
  if (atomicCAS(&errors->taken, 0u, 1u) != 0) return;
  errors->fault = static_cast<int32_t>(fault);
  errors->table = table;
  errors->value = value;
  errors->limit = limit;
  __threadfence_system();
}

// The record of one call: the caller's, or one in device memory that `finish` reads after waiting for the stream.
class Report {
 public:
  explicit Report(const Scope& scope);
  sok_error_record* errors() const { return record_; }

  // Throws what was found by a call that has no record of the caller's. Names come from the tables or lookups.
  template <typename T>
  void finish(const std::vector<T>& tables) const {
    const Finding found = read();
    const char* name = nullptr;
    for (const T& each : tables) {
      if (id_of(each).number == found.table) name = id_of(each).name;
    }
    throw_found(found, name);
  }
  void finish(const TableId& table) const;
  void finish() const;

 private:
  static const TableId& id_of(const TableId& table) { return table; }
  static const TableId& id_of(const Lookup& lookup) { return lookup.id; }
  static const TableId& id_of(const Update& update) { return update.table; }
  Finding read() const;

  const Scope& scope_;
  Buffer<sok_error_record> own_;
  sok_error_record* record_;
};

}  // namespace sok::cuda

#endif  // SOK_CUDA_REPORT_CUH_
