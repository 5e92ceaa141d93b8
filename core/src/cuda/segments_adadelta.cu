// SPDX-License-Identifier: Apache-2.0
#include "cuda/rules.cuh"

namespace sok::cuda {

template <typename Key>
SegmentLauncher<Key> adadelta_launcher(Rule rule) {
  switch (rule) {
    case Rule::kAdadelta:
      return launch_rule<ElementRule<AdadeltaStep>, Key>;
    default:
      return nullptr;
  }
}

template SegmentLauncher<uint32_t> adadelta_launcher(Rule);
template SegmentLauncher<uint64_t> adadelta_launcher(Rule);

}  // namespace sok::cuda
