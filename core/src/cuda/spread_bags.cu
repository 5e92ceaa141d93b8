// SPDX-License-Identifier: Apache-2.0
// spread_bags: output gradients -> the gradient of the sum of each part of a bag.
#include "cuda/bag_items.cuh"
#include "cuda/report.cuh"
#include "cuda/stages.h"
#include "cuda/vector.cuh"

namespace sok::cuda {
namespace {

template <int kWidth>
__global__ void __launch_bounds__(kThreads) spread_bags_kernel(const __grid_constant__ BagLaunch p) {
  for_bag_pieces<kWidth>(p, [&](const BagItem& item, float scale, int64_t pooled_at, int64_t part_at) {
    Vector<kWidth> gradient = zeros<kWidth>();
    if (item.pooled.data != nullptr && scale != 0.0f) {
      add_scaled(gradient, scale, load_constant<kWidth>(item.pooled.data + pooled_at));
    }
    const int64_t* const offsets = p.offsets + item.first_offset;
    for (uint32_t part = 0; part < item.num_parts; ++part) {
      store(gradient, p.floats + __ldg(offsets + part) + part_at);
    }
  });
}

}  // namespace

void spread_bags(const sok_context& context, const std::vector<Lookup>& lookups, const BagParts& parts,
                 const std::vector<Vectors>& output_gradients, float* gradients) {
  const Scope scope(context);
  const Report report(scope);
  Upload upload;
  const BagPlan plan(lookups, parts, output_gradients, gradients, upload);
  upload.send(scope);
  plan.run(upload, gradients, [&](int64_t blocks, const BagLaunch& p, bool wide) {
    if (wide) {
      SOK_LAUNCH(spread_bags_kernel<4>, blocks, scope.stream(), p);
    } else {
      SOK_LAUNCH(spread_bags_kernel<1>, blocks, scope.stream(), p);
    }
  });
  report.finish();
}

}  // namespace sok::cuda
