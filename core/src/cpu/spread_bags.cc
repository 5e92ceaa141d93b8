// SPDX-License-Identifier: Apache-2.0
// spread_bags: output gradients -> the gradient of the sum of each part of a bag.
#include "cpu/contents.h"
#include "cpu/stages.h"

namespace sok::cpu {

void spread_bags(const sok_context& context, const std::vector<Lookup>& lookups, const BagParts& parts,
                 const std::vector<Vectors>& output_gradients, float* gradients) {
  const auto dimension_of = [&](const BagPart& part) { return lookups[static_cast<size_t>(part.lookup)].id.dimension; };
  const int64_t bytes = task_bytes(context, 8 * parts.num_elements());
  Chunks chunks;
  for (const BagPart& part : parts.parts()) chunks.add(part.num_bags, items_per_task(bytes, 8 * dimension_of(part)));
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    const BagPart& part = parts.parts()[static_cast<size_t>(range.item)];
    const size_t i = static_cast<size_t>(part.lookup);
    const int64_t dimension = dimension_of(part);
    float* const out = gradients + part.first_element;
    if (output_gradients[i].data == nullptr) {
      std::fill(out + range.begin * dimension, out + range.end * dimension, 0.0f);
      return;
    }
    for (int64_t bag = range.begin; bag < range.end; ++bag) {
      const float factor = bag_scale(lookups[i].combiner, lookups[i].row_splits, bag);
      const float* const gradient = output_gradients[i].at(bag);
      for (int64_t d = 0; d < dimension; ++d) out[bag * dimension + d] = factor == 0.0f ? 0.0f : factor * gradient[d];
    }
  });
}

}  // namespace sok::cpu
