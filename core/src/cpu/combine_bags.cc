// SPDX-License-Identifier: Apache-2.0
// combine_bags: exchanged sums of the parts of bags -> pooled vectors.
#include "cpu/contents.h"
#include "cpu/stages.h"

namespace sok::cpu {

void combine_bags(const sok_context& context, const std::vector<Lookup>& lookups, const BagParts& parts,
                  const float* floats) {
  std::vector<std::vector<const float*>> of_lookup(lookups.size());  // the sums of each part, by rank
  for (const BagPart& part : parts.parts()) {
    of_lookup[static_cast<size_t>(part.lookup)].push_back(floats + part.first_element);
  }
  const int64_t bytes = task_bytes(context, 4 * parts.num_elements());
  Chunks chunks;
  for (const Lookup& lookup : lookups) {
    chunks.add(lookup.num_bags, items_per_task(bytes, 8 * lookup.id.dimension));
  }
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    const size_t i = static_cast<size_t>(range.item);
    const int64_t dimension = lookups[i].id.dimension;
    const std::vector<const float*>& mine = of_lookup[i];
    for (int64_t bag = range.begin; bag < range.end; ++bag) {
      float* const output = lookups[i].output.at(bag);
      std::copy_n(mine.front() + bag * dimension, dimension, output);
      for (size_t p = 1; p < mine.size(); ++p) {
        const float* const sum = mine[p] + bag * dimension;
        for (int64_t d = 0; d < dimension; ++d) output[d] += sum[d];
      }
      const float factor = bag_scale(lookups[i].combiner, lookups[i].row_splits, bag);
      // A bag whose divisor is 0 is zeros, whatever its sum.
      for (int64_t d = 0; d < dimension; ++d) output[d] = factor == 0.0f ? 0.0f : output[d] * factor;
    }
  });
}

}  // namespace sok::cpu
