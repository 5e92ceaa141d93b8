// SPDX-License-Identifier: Apache-2.0
// From an entry point to the backend of the call's device.
#ifndef SOK_API_DISPATCH_H_
#define SOK_API_DISPATCH_H_

#include "common/status.h"
#include "cpu/stages.h"

namespace sok {

// For stages that exist on the CPU only.
inline void require_cpu(const sok_context& context, const char* stage) {
  if (context.device.type == SOK_CPU) return;
#ifdef SOK_WITH_CUDA
  fail(SOK_UNIMPLEMENTED, stage, " is not implemented on CUDA devices");
#else
  fail(SOK_UNIMPLEMENTED, stage,
       ": this libsok_core was built without CUDA; build it where nvcc is, with SOK_WITH_CUDA=1");
#endif
}

}  // namespace sok

#endif  // SOK_API_DISPATCH_H_
