// SPDX-License-Identifier: Apache-2.0
#include "cuda/nvtx.h"

#include <nvtx3/nvToolsExt.h>

namespace sok::cuda {
namespace {

nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t made = nvtxDomainCreateA("sok");
  return made;
}

}  // namespace

void push_range(const char* name) noexcept {
  nvtxEventAttributes_t range = {};
  range.version = NVTX_VERSION;
  range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  range.messageType = NVTX_MESSAGE_TYPE_ASCII;
  range.message.ascii = name;
  nvtxDomainRangePushEx(domain(), &range);
}

void pop_range() noexcept { nvtxDomainRangePop(domain()); }

}  // namespace sok::cuda
