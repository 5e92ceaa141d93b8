// SPDX-License-Identifier: Apache-2.0
// Its story for the caller is told in sok/batch_memory.h.
#ifndef SOK_CUDA_BATCH_MEMORY_H_
#define SOK_CUDA_BATCH_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>

namespace sok::cuda {

class BatchMemory {
 public:
  explicit BatchMemory(int32_t device);
  ~BatchMemory();
  BatchMemory(const BatchMemory&) = delete;
  BatchMemory& operator=(const BatchMemory&) = delete;

  int32_t device() const { return device_; }

  // With the device current. See sok_batch_memory_fill and sok_batch_memory_release.
  void* fill(const void* host, size_t bytes);
  void release(void* data, void* stream);

 private:
  struct Piece {
    ~Piece();
    void* data = nullptr;
    size_t bytes = 0;
    void* copied = nullptr;  // events: the last copy is done;
    void* used = nullptr;    // what was enqueued when it was given back is
    bool given_out = false;
  };

  Piece& take(size_t bytes);

  const int32_t device_;
  void* const stream_;
  std::mutex mutex_;
  std::list<std::unique_ptr<Piece>> pieces_;  // those that are free by when they were given back
};

}  // namespace sok::cuda

#endif  // SOK_CUDA_BATCH_MEMORY_H_
