// SPDX-License-Identifier: Apache-2.0
#include "cuda/rules.cuh"

namespace sok::cuda {

template <typename Key>
SegmentLauncher<Key> adagrad_launcher(Rule rule) {
  switch (rule) {
    case Rule::kAdagrad:
      return launch_rule<ElementRule<AdagradStep>, Key>;
    case Rule::kRowwiseAdagrad:
      return launch_rule<RowwiseRule, Key>;
    default:
      return nullptr;
  }
}

template SegmentLauncher<uint32_t> adagrad_launcher(Rule);
template SegmentLauncher<uint64_t> adagrad_launcher(Rule);

}  // namespace sok::cuda
