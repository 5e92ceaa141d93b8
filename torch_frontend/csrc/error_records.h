// SPDX-License-Identifier: Apache-2.0
// The record of each CUDA device in which its calls leave what they find wrong (sok/error_record.h). One serves all
// streams of the process: a step is often spread over several.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "sok/error_record.h"

namespace sok_torch {

// The device's record, made at the first call (which starts CUDA there) and kept until the process ends. Any thread.
sok_error_record* error_record(c10::DeviceIndex device);

// Raises what the device has reported so far, once; IndexError and ValueError as on the CPU. Does not wait.
void check_error_record(c10::DeviceIndex device);

// The devices that have a record.
std::vector<int64_t> error_record_devices();

}  // namespace sok_torch
