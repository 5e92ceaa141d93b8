// SPDX-License-Identifier: Apache-2.0
// weight_gradient: d loss / d weights of the lookups.
#include <cstring>

#include "cpu/contents.h"
#include "cpu/pool.h"
#include "cpu/stages.h"

namespace sok::cpu {

void weight_gradient(const sok_context& context, const std::vector<Lookup>& lookups,
                     const std::vector<RowSource>& sources, const std::vector<Vectors>& output_gradients,
                     const std::vector<float*>& weight_gradients) {
  for (const Lookup& lookup : lookups) check_split_ends(lookup);
  const Chunks chunks = chunk_bags(context, lookups);
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range bags = chunks[task];
    const size_t i = static_cast<size_t>(bags.item);
    const Lookup& lookup = lookups[i];
    if (weight_gradients[i] == nullptr) return;
    check_splits(lookup, bags.begin, bags.end);
    const int64_t begin = first_of(lookup, bags.begin), end = first_of(lookup, bags.end);
    if (output_gradients[i].data == nullptr) {
      if (begin < end) std::memset(weight_gradients[i] + begin, 0, static_cast<size_t>(end - begin) * sizeof(float));
      return;
    }
    WeightGradientTask work = {checked_rows(lookup, sources[i], begin, end),
                               lookup.row_splits,
                               lookup.weights,
                               nullptr,
                               output_gradients[i].stride,
                               weight_gradients[i],
                               lookup.id.dimension,
                               lookup.combiner};
    for_members(output_gradients[i], bags.begin, bags.end, [&](int64_t first, int64_t last, const float* gradient) {
      work.output_gradient = gradient;
      kernels().weight_gradient(work, first, last);
    });
  });
}

}  // namespace sok::cpu
