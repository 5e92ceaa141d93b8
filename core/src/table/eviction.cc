// SPDX-License-Identifier: Apache-2.0
#include "table/eviction.h"

#include <utility>

#include "cpu/eviction.h"

namespace sok {

std::unique_ptr<Eviction> make_eviction([[maybe_unused]] sok_device device, sok_eviction strategy, int64_t half_life,
                                        int64_t capacity, [[maybe_unused]] int64_t most_slots,
                                        std::unique_ptr<ReservedRange> scores) {
#ifdef SOK_WITH_CUDA
  if (device.type == SOK_CUDA)
    return cuda::make_eviction(device, strategy, half_life, capacity, most_slots, std::move(scores));
#endif
  return std::make_unique<cpu::Eviction>(strategy, half_life, capacity, std::move(scores));
}

}  // namespace sok
