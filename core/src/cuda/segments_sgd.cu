// SPDX-License-Identifier: Apache-2.0
#include "cuda/rules.cuh"

namespace sok::cuda {

template <typename Key>
SegmentLauncher<Key> sgd_launcher(Rule rule) {
  switch (rule) {
    case Rule::kSgd:
      return launch_rule<ElementRule<SgdStep>, Key>;
    case Rule::kMomentum:
      return launch_rule<ElementRule<MomentumStep>, Key>;
    default:
      return nullptr;
  }
}

template SegmentLauncher<uint32_t> sgd_launcher(Rule);
template SegmentLauncher<uint64_t> sgd_launcher(Rule);

}  // namespace sok::cuda
