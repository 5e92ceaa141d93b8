// SPDX-License-Identifier: Apache-2.0
// From an entry point to the backend of the call's device.
#ifndef SOK_API_DISPATCH_H_
#define SOK_API_DISPATCH_H_

#include "api/stage_range.h"
#include "common/status.h"
#include "cpu/stages.h"

#ifdef SOK_WITH_CUDA
#include "cuda/stages.h"
#endif

namespace sok {

inline void require_cpu(const sok_context& context, const char* stage) {
  if (context.device.type == SOK_CPU) return;
  fail(SOK_UNIMPLEMENTED, stage,
       ": this libsok_core was built without CUDA; build it where nvcc is, with SOK_WITH_CUDA=1");
}

// Calls cpu::stage or cuda::stage, whose parameters are the same, in a range of the stage's name, or of another.
#ifdef SOK_WITH_CUDA
#define SOK_DISPATCH_AS(name, context, stage, ...) \
  (StageRange(name),                               \
   (context).device.type == SOK_CUDA ? cuda::stage((context), __VA_ARGS__) : cpu::stage((context), __VA_ARGS__))
#else
#define SOK_DISPATCH_AS(name, context, stage, ...) \
  (StageRange(name), require_cpu((context), name), cpu::stage((context), __VA_ARGS__))
#endif
#define SOK_DISPATCH(context, stage, ...) SOK_DISPATCH_AS(#stage, context, stage, __VA_ARGS__)

}  // namespace sok

#endif  // SOK_API_DISPATCH_H_
