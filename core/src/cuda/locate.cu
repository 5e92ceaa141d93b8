// SPDX-License-Identifier: Apache-2.0
// locate: key -> slot on the owner.
#include "cuda/launch.h"
#include "cuda/placement.cuh"
#include "cuda/stages.h"
#include "cuda/upload.h"

namespace sok::cuda {
namespace {

struct Block {  // the keys of one source rank and table
  int64_t first;
  DevicePlacement placement;
};

__global__ void __launch_bounds__(kThreads) locate_kernel(const Block* blocks, uint32_t num_blocks, const int64_t* keys,
                                                          int64_t num_keys, int64_t* slots, sok_error_record* errors) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_keys) return;
  const uint32_t b = last_at_or_before(num_blocks, i, [&](uint32_t at) { return __ldg(&blocks[at].first); });
  slots[i] = blocks[b].placement.local_slot(keys[i], errors);
}

}  // namespace

void locate(const sok_context& context, const std::vector<Table>& tables, int32_t num_sources, const int64_t* counts,
            const int64_t* keys, int64_t* slots, uint32_t /*flags*/) {
  const Scope scope(context);
  const Report report(scope);
  std::vector<Block> blocks;
  int64_t total = 0;
  for (int32_t source = 0; source < num_sources; ++source) {
    for (size_t t = 0; t < tables.size(); ++t) {
      blocks.push_back({total, DevicePlacement::of(tables[t].placement, tables[t].number)});
      total += *counts++;
    }
  }
  if (total > 0) {
    Upload upload;
    const size_t place = upload.add(blocks);
    upload.send(scope);
    SOK_LAUNCH(locate_kernel, ceil_div(total, kThreads), scope.stream(), upload.at<Block>(place),
               static_cast<uint32_t>(blocks.size()), keys, total, slots, report.errors());
  }
  report.finish(tables);
}

}  // namespace sok::cuda
