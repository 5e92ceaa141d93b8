// SPDX-License-Identifier: Apache-2.0
// copy: messages put together from several arrays and taken apart again.
#include <cstring>

#include "common/parallel.h"
#include "cpu/stages.h"

namespace sok::cpu {

void copy(const sok_context& context, const std::vector<Copy>& copies) {
  Chunks chunks;
  for (const Copy& each : copies) chunks.add(each.bytes, int64_t{1} << 20);
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    const Copy& each = copies[static_cast<size_t>(range.item)];
    std::memcpy(static_cast<char*>(each.target) + range.begin, static_cast<const char*>(each.source) + range.begin,
                static_cast<size_t>(range.end - range.begin));
  });
}

}  // namespace sok::cpu
