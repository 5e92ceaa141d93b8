// SPDX-License-Identifier: Apache-2.0
// Error records in host memory that the device writes to, for code that is compiled without CUDA's headers.
#ifndef SOK_CUDA_ERROR_RECORD_H_
#define SOK_CUDA_ERROR_RECORD_H_

#include <cstdint>

#include "common/error_record.h"

namespace sok::cuda {

// Page-locked and mapped; seen by every device under the same address. Throws Error.
sok_error_record* create_error_record(int32_t device);
void destroy_error_record(sok_error_record* record);

// Waits for all that was enqueued on the device. False where a stream of it is being captured, which cannot be waited
// for. Throws Error when the device has failed.
bool wait_for_device(int32_t device);

// Enqueues: flags[0], flags[stride], ... of n become 1 where context.errors holds something, 0 where it does not or
// there is none.
void flag_errors(const sok_context& context, int64_t* flags, int64_t n, int64_t stride);

}  // namespace sok::cuda

#endif  // SOK_CUDA_ERROR_RECORD_H_
