// SPDX-License-Identifier: Apache-2.0
// combine_bags: exchanged sums of the parts of bags -> pooled vectors.
#include "cuda/bag_items.cuh"
#include "cuda/report.cuh"
#include "cuda/stages.h"
#include "cuda/vector.cuh"

namespace sok::cuda {
namespace {

template <int kWidth>
__global__ void __launch_bounds__(kThreads) combine_bags_kernel(const __grid_constant__ BagLaunch p) {
  for_bag_pieces<kWidth>(p, [&](const BagItem& item, float scale, int64_t pooled_at, int64_t part_at) {
    const int64_t* const offsets = p.offsets + item.first_offset;
    Vector<kWidth> sum = zeros<kWidth>();
    for (uint32_t part = 0; part < item.num_parts; ++part) {
      add(sum, load_constant<kWidth>(p.floats + __ldg(offsets + part) + part_at));
    }
    // A bag whose divisor is 0 is zeros, whatever its sum.
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum.v[i] = scale == 0.0f ? 0.0f : sum.v[i] * scale;
    store_streaming(sum, item.pooled.data + pooled_at);
  });
}

}  // namespace

void combine_bags(const sok_context& context, const std::vector<Lookup>& lookups, const BagParts& parts,
                  const float* floats) {
  const Scope scope(context);
  const Report report(scope);
  std::vector<Vectors> outputs;
  for (const Lookup& lookup : lookups) outputs.push_back(lookup.output);
  Upload upload;
  const BagPlan plan(lookups, parts, outputs, floats, upload);
  upload.send(scope);
  plan.run(upload, const_cast<float*>(floats), [&](int64_t blocks, const BagLaunch& p, bool wide) {
    if (wide) {
      SOK_LAUNCH(combine_bags_kernel<4>, blocks, scope.stream(), p);
    } else {
      SOK_LAUNCH(combine_bags_kernel<1>, blocks, scope.stream(), p);
    }
  });
  report.finish();
}

}  // namespace sok::cuda
