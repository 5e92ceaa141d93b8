// SPDX-License-Identifier: Apache-2.0
// Devices, streams, events and memory of the CUDA runtime, for code that is compiled without CUDA's headers. Streams
// and events are cudaStream_t and cudaEvent_t. Each function throws Error unless it is noexcept.
#ifndef SOK_CUDA_RUNTIME_H_
#define SOK_CUDA_RUNTIME_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "sok/context.h"

namespace sok::cuda {

// Makes a device current for the calling thread, and the previous one again at the end of the block.
class CurrentDevice {
 public:
  explicit CurrentDevice(int32_t device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int32_t device_;
  int previous_ = 0;
};

// A context as Scope has it: with functions in `allocator`.
sok_context with_allocator(const sok_context& context);

// For a thread that only watches: the device is made current for good, and what it asks for does not disturb a stream
// that another thread is capturing.
void enter_watching_thread(int32_t device);

std::string device_uuid(int32_t device);  // makes no context

// The following ones work on the current device.
int num_multiprocessors();
void* create_stream();  // does not wait for the legacy default stream
void destroy_stream(void* stream) noexcept;
void* allocate(size_t bytes);
void release(void* memory) noexcept;
void* allocate_page_locked(size_t bytes);  // in host memory; the device reads and writes it at the same address
void release_page_locked(void* memory) noexcept;
void* create_event();
void destroy_event(void* event) noexcept;
void record_event(void* event, void* stream);
bool is_done(void* event);  // whether everything before its last record is done; of a new event: true
bool is_capturing(void* stream);
void wait(void* stream);
void wait_for_event(void* event);           // blocks until everything before its last record is done
void make_wait(void* stream, void* event);  // what is enqueued on the stream from now on comes after that
void copy(void* to, const void* from, size_t bytes, void* stream);  // enqueues; any direction
bool is_idle(void* stream);                                         // whether everything that was enqueued is done

// Enqueues: message [num_cells / num_columns, num_columns] becomes the columns of `counts`, whose rows are `stride`
// apart, but 1 in the last one where `errors`, if there is one, holds something.
void write_counts(const int64_t* counts, int64_t stride, const sok_error_record* errors, int64_t num_cells,
                  int64_t num_columns, int64_t* message, void* stream);

// Enqueues: flags[0..n) become 1 where a rank has failed or `errors` holds something, else 0.
void write_flags(const sok_error_record* errors, bool failed, int64_t n, int64_t* flags, void* stream);

// Enqueues: `errors` becomes full where another flag than flags[rank] of n is set.
void read_flags(const int64_t* flags, int64_t n, int64_t rank, sok_error_record* errors, void* stream);

}  // namespace sok::cuda

#endif  // SOK_CUDA_RUNTIME_H_
