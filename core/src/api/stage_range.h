// SPDX-License-Identifier: Apache-2.0
// What NVIDIA's profilers see of a call: a range named after its stage, also on the CPU. Builds without CUDA have none.
#ifndef SOK_API_STAGE_RANGE_H_
#define SOK_API_STAGE_RANGE_H_

#ifdef SOK_WITH_CUDA
#include "cuda/nvtx.h"
#endif

namespace sok {

// As long as it lives the stage's range is open.
class StageRange {
 public:
  explicit StageRange([[maybe_unused]] const char* stage) {
#ifdef SOK_WITH_CUDA
    cuda::push_range(stage);
#endif
  }
  ~StageRange() {
#ifdef SOK_WITH_CUDA
    cuda::pop_range();
#endif
  }
  StageRange(const StageRange&) = delete;
  StageRange& operator=(const StageRange&) = delete;
};

}  // namespace sok

#endif  // SOK_API_STAGE_RANGE_H_
