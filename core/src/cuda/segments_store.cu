// SPDX-License-Identifier: Apache-2.0
#include "cuda/rules.cuh"

namespace sok::cuda {

template <typename Key>
SegmentLauncher<Key> store_launcher(Rule rule) {
  switch (rule) {
    case Rule::kStore:
      return launch_rule<StoreRule, Key>;
    default:
      return nullptr;
  }
}

template SegmentLauncher<uint32_t> store_launcher(Rule);
template SegmentLauncher<uint64_t> store_launcher(Rule);

}  // namespace sok::cuda
