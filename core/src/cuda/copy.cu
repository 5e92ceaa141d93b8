// SPDX-License-Identifier: Apache-2.0
// copy: messages put together from several arrays and taken apart again.
#include "cuda/check.h"
#include "cuda/context.h"
#include "cuda/report.cuh"
#include "cuda/stages.h"

namespace sok::cuda {

void copy(const sok_context& context, const std::vector<Copy>& copies) {
  const Scope scope(context);
  const Report report(scope);
  for (const Copy& each : copies) {
    SOK_CUDA_CHECK(cudaMemcpyAsync(each.target, each.source, static_cast<size_t>(each.bytes), cudaMemcpyDeviceToDevice,
                                   scope.stream()));
  }
  report.finish();
}

}  // namespace sok::cuda
