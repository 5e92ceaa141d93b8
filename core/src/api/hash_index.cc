// SPDX-License-Identifier: Apache-2.0
// Entry points of sok/hash_index.h.
#include "table/hash_index.h"

#include "api/dispatch.h"
#include "api/on_device.h"
#include "common/call.h"
#include "common/status.h"
#include "common/tensor.h"

using namespace sok;  // NOLINT: entry points only

namespace {

void check_index(const sok_context& context, const sok_hash_index* index) {
  SOK_CHECK(index != nullptr, "index is NULL");
  SOK_CHECK(context.device.type == index->device().type && context.device.index == index->device().index,
            "context.device is another device than the index's");
  index->join(context);
}

}  // namespace

extern "C" int sok_hash_index_create(const sok_hash_index_config* config, sok_hash_index** index) {
  return SOK_ENTRY({
    SOK_CHECK(config != nullptr, "config is NULL");
    SOK_CHECK(index != nullptr, "index is NULL");
    check_hash_index_config(*config);
    check_device(config->device);
    on_device(config->device, [&]() { *index = make_hash_index(*config).release(); });
  });
}

extern "C" int sok_hash_index_destroy(sok_hash_index* index) {
  return SOK_ENTRY({
    if (index != nullptr) on_device(index->device(), [&]() { delete index; });
  });
}

extern "C" const sok_index* sok_hash_index_as_index(const sok_hash_index* index) {
  return index != nullptr ? index->as_index() : nullptr;
}

#define SOK_HASH_CALL(stage)                                                                     \
  SOK_ENTRY({                                                                                    \
    const sok_context& checked = check_context(context);                                         \
    const std::vector<HashRequest> views = check_hash_requests(checked, num_requests, requests); \
    for (const HashRequest& view : views) view.index->join(checked);                             \
    SOK_DISPATCH(checked, stage, views);                                                         \
  })

extern "C" int sok_hash_index_find(const sok_context* context, int32_t num_requests,
                                   const sok_hash_index_request* requests) {
  return SOK_HASH_CALL(hash_find);
}

extern "C" int sok_hash_index_find_or_insert(const sok_context* context, int32_t num_requests,
                                             const sok_hash_index_request* requests) {
  return SOK_HASH_CALL(hash_find_or_insert);
}

extern "C" int sok_hash_index_erase(const sok_context* context, int32_t num_requests,
                                    const sok_hash_index_request* requests) {
  return SOK_HASH_CALL(hash_erase);
}

extern "C" int sok_hash_index_reserve(const sok_context* context, sok_hash_index* index, int64_t rows) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    check_index(checked, index);
    SOK_CHECK(rows >= 0 && rows <= index->capacity(), "table '", index->name(), "': rows is ", rows,
              ", must be in [0, ", index->capacity(), "], the capacity");
    index->reserve(checked, rows);
  });
}

extern "C" int sok_hash_index_clear(const sok_context* context, sok_hash_index* index) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    check_index(checked, index);
    index->clear(checked);
  });
}

extern "C" int sok_hash_index_size(const sok_context* context, const sok_hash_index* index, int64_t* size) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    check_index(checked, index);
    SOK_CHECK(size != nullptr, "size is NULL");
    *size = index->size(checked);
  });
}

extern "C" int sok_hash_index_export(const sok_context* context, const sok_hash_index* index, int64_t first_slot,
                                     sok_tensor keys, sok_tensor slots, sok_tensor count) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    check_index(checked, index);
    SOK_CHECK(first_slot >= 0, "first_slot is ", first_slot, ", must not be negative");
    int64_t* const key_data = checked_data<int64_t>(keys, {"keys"}, SOK_INT64, {kAnySize});
    const int64_t n = keys.shape[0];
    int64_t* const slot_data = checked_data<int64_t>(slots, {"slots"}, SOK_INT64, {n});
    int64_t* const count_data = checked_data<int64_t>(count, {"count"}, SOK_INT64, {1});
    index->export_slots(checked, first_slot, n, key_data, slot_data, count_data);
  });
}

extern "C" int64_t sok_hash_index_capacity(const sok_hash_index* index) {
  return index != nullptr ? index->capacity() : 0;
}

extern "C" int64_t sok_hash_index_num_slots(const sok_hash_index* index) {
  return index != nullptr ? index->num_slots() : 0;
}

extern "C" int64_t sok_hash_index_bytes(const sok_hash_index* index) { return index != nullptr ? index->bytes() : 0; }
