// SPDX-License-Identifier: Apache-2.0
#include "cuda/rules.cuh"

namespace sok::cuda {

template <typename Key>
SegmentLauncher<Key> rmsprop_launcher(Rule rule) {
  switch (rule) {
    case Rule::kRmsProp:
      return launch_rule<ElementRule<RmsPropStep<false, false>>, Key>;
    case Rule::kRmsPropMomentum:
      return launch_rule<ElementRule<RmsPropStep<false, true>>, Key>;
    case Rule::kRmsPropCentered:
      return launch_rule<ElementRule<RmsPropStep<true, false>>, Key>;
    case Rule::kRmsPropCenteredMomentum:
      return launch_rule<ElementRule<RmsPropStep<true, true>>, Key>;
    default:
      return nullptr;
  }
}

template SegmentLauncher<uint32_t> rmsprop_launcher(Rule);
template SegmentLauncher<uint64_t> rmsprop_launcher(Rule);

}  // namespace sok::cuda
