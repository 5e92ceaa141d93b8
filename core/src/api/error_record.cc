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

namespace {

// Not const: atomic_ref takes no const before C++26.
template <typename T>
T load(const T& word, std::memory_order order = std::memory_order_relaxed) {
  return std::atomic_ref<T>(const_cast<T&>(word)).load(order);
}

// Whether the device has come past everything that was given the record; not while a stream is being captured.
bool wait_for_device([[maybe_unused]] const RecordKeeper* keeper) {
#ifdef SOK_WITH_CUDA
  return keeper == nullptr || cuda::wait_for_device(keeper->device);
#else
  return true;
#endif
}

// Throws what a full record says, and empties it.
void throw_recorded(sok_error_record& record) {
  std::unique_lock<std::mutex> emptying;
  if (record.keeper != nullptr) emptying = std::unique_lock<std::mutex>(record.keeper->emptying);
  if (!is_full(record)) return;  // another thread has thrown it
  const bool passed = wait_for_device(record.keeper);
  const Finding found = find_recorded(record);
  if (passed && load(record.taken) != 0) {
    std::atomic_ref<int32_t>(record.fault).store(0, std::memory_order_relaxed);
    std::atomic_ref<uint32_t>(record.taken).store(0, std::memory_order_release);  // last: a device may take it again
  } else if (passed) {
    std::atomic_ref<int32_t>(record.ended).store(0, std::memory_order_release);
  }
  naming_rank(load(record.rank), load(record.num_ranks), [&] {
    throw_found(found, record.keeper != nullptr ? record.keeper->names.name_of(found.table) : nullptr);
  });
}

}  // namespace

void set_rank(sok_error_record* record, int32_t rank, int32_t num_ranks) {
  std::atomic_ref<int32_t>(record->rank).store(rank, std::memory_order_relaxed);
  std::atomic_ref<int32_t>(record->num_ranks).store(num_ranks, std::memory_order_relaxed);
}

bool is_full(const sok_error_record& record) {
  return load(record.taken, std::memory_order_acquire) != 0 || load(record.ended, std::memory_order_acquire) != 0;
}

Finding find_recorded(const sok_error_record& record) {
  const auto fault = static_cast<Fault>(load(record.fault, std::memory_order_acquire));
  if (fault == Fault::kNone) return {static_cast<Fault>(load(record.ended)), 0, 0, 0};
  return {fault, load(record.table), load(record.value), load(record.limit)};
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
    case Fault::kPeer:
      fail(SOK_FAILED_PRECONDITION, "rank ", found.value,
           " has failed; its own error message says why. No row was changed here either");
    case Fault::kFull:
      fail(SOK_RESOURCE_EXHAUSTED, table, " holds ", found.value, " of at most ", found.limit,
           " keys, and has no room for the new ones of this batch; nothing was inserted");
    case Fault::kCollision:
      fail(SOK_RESOURCE_EXHAUSTED, table, ": more than ", found.limit,
           " keys have hashes that are nearly the same, which its index has no room for; nothing was inserted");
    case Fault::kLostKey:
      fail(SOK_FAILED_PRECONDITION, table, ": a row of this gradient was erased or evicted after the lookup (slot ",
           found.value, "); nothing was changed. Step before rows are erased, or look them up again");
    case Fault::kManyKeys:
      fail(SOK_RESOURCE_EXHAUSTED, table, ": this batch has more different keys than its capacity, ", found.limit,
           "; nothing was inserted");
    case Fault::kManyGuests:
      fail(SOK_RESOURCE_EXHAUSTED, table,
           ": this step has more different keys that get no row than there are slots for, ", found.limit,
           "; nothing was inserted");
    case Fault::kScore:
      fail(SOK_INVALID_ARGUMENT, table, ": scores[", found.limit, "] is ", found.value, ", which is none");
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
    if (is_full(*record)) throw_recorded(*record);
  });
}

extern "C" int sok_error_record_is_empty(const sok_error_record* record) {
  return record == nullptr || !is_full(*record) ? 1 : 0;
}

extern "C" int sok_error_record_flag(const sok_context* context, sok_tensor flags) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    sok_tensor column = flags;  // elements may lie apart as rows of one column do
    if (flags.rank == 2 && flags.shape[1] == 1) column.rank = 1, column.row_stride = 0;
    int64_t* data = checked_data<int64_t>(column, {"flags"}, SOK_INT64, {kAnySize});
    const int64_t n = flags.shape[0], stride = column.rank != flags.rank ? std::max<int64_t>(1, flags.row_stride) : 1;
    if (checked.device.type == SOK_CPU) {
      for (int64_t i = 0; i < n; ++i) data[i * stride] = 0;
      return;
    }
#ifdef SOK_WITH_CUDA
    cuda::flag_errors(checked, data, n, stride);
#else
    fail(SOK_UNIMPLEMENTED, "CUDA device ", checked.device.index,
         " was asked for, but this library was built without CUDA");
#endif
  });
}
