// SPDX-License-Identifier: Apache-2.0
// Entry points of sok/reserved_range.h.
#include "table/reserved_range.h"

#include "api/on_device.h"
#include "common/call.h"
#include "common/status.h"

using namespace sok;  // NOLINT: entry points only

extern "C" int sok_reserved_range_create(const sok_reserved_range_config* config, sok_reserved_range** range) {
  return SOK_ENTRY({
    SOK_CHECK(config != nullptr, "config is NULL");
    SOK_CHECK(range != nullptr, "range is NULL");
    SOK_CHECK(config->struct_size == sizeof(sok_reserved_range_config), "config.struct_size is ", config->struct_size,
              ", must be ", sizeof(sok_reserved_range_config));
    const sok_device device = config->device;
    check_device(device);
    SOK_CHECK(config->bytes > 0 && config->bytes <= INT64_MAX / 2, "config.bytes is ", config->bytes,
              ", must be a number of bytes above 0");
    SOK_CHECK(config->device_bytes >= 0, "config.device_bytes is ", config->device_bytes, ", must not be negative");
    on_device(device, [&]() { *range = reserve_range(*config).release(); });
  });
}

extern "C" int sok_reserved_range_destroy(sok_reserved_range* range) {
  return SOK_ENTRY({
    if (range != nullptr) on_device(range->device(), [&]() { delete range; });
  });
}

extern "C" void* sok_reserved_range_data(const sok_reserved_range* range) {
  return range != nullptr ? range->data() : nullptr;
}

extern "C" int64_t sok_reserved_range_reserved_bytes(const sok_reserved_range* range) {
  return range != nullptr ? range->reserved_bytes() : 0;
}

extern "C" int64_t sok_reserved_range_backed_bytes(const sok_reserved_range* range) {
  return range != nullptr ? range->backed_bytes() : 0;
}

extern "C" int64_t sok_reserved_range_host_bytes(const sok_reserved_range* range) {
  return range != nullptr ? range->host_bytes() : 0;
}

extern "C" int sok_reserved_range_grow(sok_reserved_range* range, int64_t bytes) {
  return SOK_ENTRY({
    SOK_CHECK(range != nullptr, "range is NULL");
    SOK_CHECK(bytes >= 0, "bytes is ", bytes, ", must not be negative");
    on_device(range->device(), [&]() { range->grow(bytes); });
  });
}

extern "C" int sok_reserved_range_shrink(const sok_context* context, sok_reserved_range* range, int64_t bytes) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    SOK_CHECK(range != nullptr, "range is NULL");
    SOK_CHECK(bytes >= 0, "bytes is ", bytes, ", must not be negative");
    const sok_device device = range->device();
    SOK_CHECK(checked.device.type == device.type && checked.device.index == device.index,
              "context.device is another device than the range's");
    on_device(device, [&]() {
#ifdef SOK_WITH_CUDA
      if (device.type == SOK_CUDA && bytes < range->backed_bytes()) {
        SOK_CHECK_STATUS(SOK_FAILED_PRECONDITION, !cuda::is_capturing(checked.stream),
                         "a range cannot shrink while its stream is being captured in a CUDA graph");
        cuda::wait(checked.stream);
      }
#endif
      range->shrink(bytes);
    });
  });
}
