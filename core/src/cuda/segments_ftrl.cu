// SPDX-License-Identifier: Apache-2.0
#include "cuda/rules.cuh"

namespace sok::cuda {

template <typename Key>
SegmentLauncher<Key> ftrl_launcher(Rule rule) {
  switch (rule) {
    case Rule::kFtrl:
      return launch_rule<ElementRule<FtrlStep<true>>, Key>;
    case Rule::kFtrlPower:
      return launch_rule<ElementRule<FtrlStep<false>>, Key>;
    default:
      return nullptr;
  }
}

template SegmentLauncher<uint32_t> ftrl_launcher(Rule);
template SegmentLauncher<uint64_t> ftrl_launcher(Rule);

}  // namespace sok::cuda
