// SPDX-License-Identifier: Apache-2.0
#include "error_records.h"

#include <map>
#include <mutex>

#include "status.h"

namespace sok_torch {
namespace {

std::mutex mutex;
std::map<c10::DeviceIndex, sok_error_record*> records;  // never freed: a device may write until the process ends

sok_error_record* find(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = records.find(device);
  return found == records.end() ? nullptr : found->second;
}

}  // namespace

sok_error_record* error_record(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> lock(mutex);
  sok_error_record*& record = records[device];
  if (record == nullptr) check(sok_error_record_create({SOK_CUDA, device}, &record));
  return record;
}

void check_error_record(c10::DeviceIndex device) {
  sok_error_record* record = find(device);
  if (record != nullptr) check(sok_error_record_check(record));
}

std::vector<int64_t> error_record_devices() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<int64_t> result;
  for (const auto& [device, record] : records) {
    if (record != nullptr) result.push_back(device);
  }
  return result;
}

}  // namespace sok_torch
