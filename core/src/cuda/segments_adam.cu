// SPDX-License-Identifier: Apache-2.0
#include "cuda/rules.cuh"

namespace sok::cuda {

template <typename Key>
SegmentLauncher<Key> adam_launcher(Rule rule) {
  switch (rule) {
    case Rule::kAdam:
      return launch_rule<ElementRule<AdamStep>, Key>;
    case Rule::kAdamax:
      return launch_rule<ElementRule<AdamaxStep>, Key>;
    default:
      return nullptr;
  }
}

template SegmentLauncher<uint32_t> adam_launcher(Rule);
template SegmentLauncher<uint64_t> adam_launcher(Rule);

}  // namespace sok::cuda
