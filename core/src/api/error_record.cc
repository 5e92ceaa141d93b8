// SPDX-License-Identifier: Apache-2.0
// Entry points of sok/error_record.h.
#include "common/error_record.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "common/call.h"
#include "common/status.h"
#include "common/tensor.h"

#ifdef SOK_WITH_CUDA
#include "cuda/error_record.h"
#endif

namespace sok {

int32_t TableNames::number_of(const char* name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto [found, is_new] = numbers_.try_emplace(name, static_cast<int32_t>(names_.size()));
  if (is_new) names_.push_back(found->first.c_str());
  return found->second;
}

const char* TableNames::name_of(int32_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return number >= 0 && static_cast<size_t>(number) < names_.size() ? names_[static_cast<size_t>(number)] : nullptr;
}

Finding find_recorded(const sok_error_record& record) {
  uint64_t pieces[kFindingPieces];
  const auto read = [&]() {
    bool same = true;
    for (int i = 0; i < kFindingPieces; ++i) {
      pieces[i] = *const_cast<const volatile uint64_t*>(&record.pieces[i]);
      same = same && pieces[i] >> 32 == pieces[0] >> 32;
    }
    return same;
  };
  for (int tries = 0; !read() && tries < 1000000;) ++tries;
  if (pieces[0] == 0) return {static_cast<Fault>(record.fault), 0, 0, 0};  // the host has found it
  const auto number = [&](int i) { return static_cast<int64_t>(pieces[i + 1] << 32 | (pieces[i] & UINT32_MAX)); };
  return {static_cast<Fault>(pieces[0] & UINT32_MAX), static_cast<int32_t>(pieces[1] & UINT32_MAX), number(2),
          number(4)};
}

void throw_found(const Finding& found, const char* table_name) {
  const std::string table =
      table_name != nullptr ? "table '" + std::string(table_name) + "'" : "table " + std::to_string(found.table);
  switch (found.fault) {
    case Fault::kNone:
      return;
    case Fault::kKey:
      fail(SOK_OUT_OF_RANGE, table, ": key ", found.value, " is outside [0, ", found.limit, ")");
    case Fault::kForeignKey:
      fail(SOK_OUT_OF_RANGE, table, ": key ", found.value, " belongs to rank ", found.limit, ", not to this one");
    case Fault::kSlot:
      fail(SOK_OUT_OF_RANGE, table, ": slot ", found.value, " is outside [0, ", found.limit, ")");
    case Fault::kRowSplits:
      fail(SOK_INVALID_ARGUMENT, table, ": row_splits of bag ", found.value,
           " do not fit: they must ascend from 0 to the number of keys, ", found.limit);
    case Fault::kBag:
      fail(SOK_OUT_OF_RANGE, "row ", found.value, " is outside [0, ", found.limit, ")");
    case Fault::kOffset:
      fail(SOK_OUT_OF_RANGE, table, ": inverse ", found.value, " is outside the ", found.limit,
           " elements of the exchanged rows");
    case Fault::kRouting:
      fail(SOK_INVALID_ARGUMENT, "routing: entry ", found.value, " is not among the ", found.limit,
           " entries of the lookups, or belongs to two unique keys");
    case Fault::kExchange:
      fail(SOK_UNAVAILABLE,
           "an exchange with the other ranks was ended before it was complete, so nothing was applied");
  }
  fail(SOK_INTERNAL, "a device reported the unknown fault ", static_cast<int32_t>(found.fault));
}

}  // namespace sok

using namespace sok;  // NOLINT: entry points only

extern "C" int sok_error_record_create(sok_device device, sok_error_record** record) {
  return SOK_ENTRY({
    SOK_CHECK(record != nullptr, "record is NULL");
    SOK_CHECK(device.type == SOK_CUDA, "device.type is ", device.type, ", must be SOK_CUDA");
#ifdef SOK_WITH_CUDA
    *record = cuda::create_error_record(device.index);
#else
    fail(SOK_UNIMPLEMENTED, "CUDA device ", device.index, " was asked for, but this library was built without CUDA");
#endif
  });
}

extern "C" int sok_error_record_destroy(sok_error_record* record) {
  return SOK_ENTRY({
    if (record == nullptr) return;
#ifdef SOK_WITH_CUDA
    cuda::destroy_error_record(record);
#endif
  });
}

extern "C" int sok_error_record_check(sok_error_record* record) {
  return SOK_ENTRY({
    SOK_CHECK(record != nullptr, "record is NULL");
    if (std::atomic_ref<int32_t>(record->fault).load(std::memory_order_acquire) == 0) return;
    const Finding found = find_recorded(*record);
    TableNames* const names = record->names;
    const uint32_t calls = std::atomic_ref<uint32_t>(record->calls).load();
    *record = sok_error_record{};
    record->names = names;
    record->calls = calls;
    throw_found(found, names != nullptr ? names->name_of(found.table) : nullptr);
  });
}

extern "C" int sok_error_record_is_empty(const sok_error_record* record) {
  if (record == nullptr) return 1;
  auto& fault = const_cast<int32_t&>(record->fault);  // atomic_ref takes no const before C++26
  return std::atomic_ref<int32_t>(fault).load(std::memory_order_acquire) == 0 ? 1 : 0;
}

extern "C" int sok_error_record_flag(const sok_context* context, sok_tensor flags) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    int64_t* data = checked_data<int64_t>(flags, {"flags"}, SOK_INT64, {kAnySize});
    if (checked.device.type == SOK_CPU) {
      std::fill_n(data, flags.shape[0], 0);
      return;
    }
#ifdef SOK_WITH_CUDA
    cuda::flag_errors(checked, data, flags.shape[0]);
#else
    fail(SOK_UNIMPLEMENTED, "CUDA device ", checked.device.index,
         " was asked for, but this library was built without CUDA");
#endif
  });
}
