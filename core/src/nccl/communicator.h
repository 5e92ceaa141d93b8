// SPDX-License-Identifier: Apache-2.0
// One rank's end of a communicator. Its story for the caller is told in sok/communicator.h.
//
// The NCCL communicator is a blocking one: a non-blocking one starts a thread for each exchange. That is safe since all
// connections are made while it is created, under a time limit, so that later calls only enqueue.
#ifndef SOK_NCCL_COMMUNICATOR_H_
#define SOK_NCCL_COMMUNICATOR_H_

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl/library.h"
#include "nccl/process.h"
#include "nccl/swap_memory.h"
#include "nccl/watch.h"
#include "sok/communicator.h"

namespace sok::nccl {

using Clock = std::chrono::steady_clock;

class Communicator {
 public:
  // Connects all ranks; throws Error. `id` is what make_id() gave one of them.
  static std::unique_ptr<Communicator> create(int32_t device, const sok_communicator_id& id, int32_t num_ranks,
                                              int32_t rank, double timeout);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int32_t device() const { return device_; }
  int32_t num_ranks() const { return num_ranks_; }
  bool is_forked() const;

  // Counts are in elements of `item` bytes; they have been checked. Enqueues.
  void all_to_all(const sok_context& context, const char* send, const int64_t* send_counts, char* receive,
                  const int64_t* receive_counts, size_t item);

  // counts: [num_ranks, k] on the device; sent, received: [num_ranks, k] on the host. Waits for the context's stream.
  void swap_counts(const sok_context& context, const sok_tensor& counts, int64_t* sent, int64_t* received);

  // Arrays of one dtype, that of `type`; they have been checked. Enqueues.
  void all_reduce(const sok_context& context, Reduction reduction, DataType type, int32_t num_arrays,
                  const sok_tensor* send, const sok_tensor* receive);
  // Before the first of them. Waits.
  void prepare_all_reduce();

  // Fills context.errors, if another rank has failed or its record is full. Enqueues.
  void share_errors(const sok_context& context, bool failed);

  // Throws Error(SOK_UNAVAILABLE) with the reason once the communicator has failed.
  void check();

  // Makes it fail for that reason, unless it has failed already, and ends what is pending. `inside`: by the thread that
  // holds `use_`, where there is one.
  void give_up(const std::string& reason, bool inside = false);

  // Waits until nothing is pending, or the communicator has failed, and ends its thread. False: that thread does not
  // come back from NCCL, and the object must not be freed.
  bool finish();

 private:
  Communicator(int32_t device, int32_t num_ranks, int32_t rank, double time_limit);
  void join(const UniqueId& id, Clock::time_point deadline);
  void introduce(Clock::time_point deadline);
  void exchange(const char* send, const int64_t* send_counts, char* receive, const int64_t* receive_counts, size_t item,
                Stream stream);
  void exchange_with_peers(const char* send, const int64_t* send_counts, const std::vector<size_t>& from, char* receive,
                           const int64_t* receive_counts, const std::vector<size_t>& to, size_t item, Stream stream);
  void reduce(Reduction reduction, DataType type, int32_t num_arrays, const sok_tensor* send, const sok_tensor* receive,
              Stream stream);
  void enqueue_swap(const sok_context& context, const sok_tensor& counts, int64_t first, int64_t n);
  // Waits for the stream; throws a while after the communicator has failed.
  void wait(Stream stream);
  void settle(Result result, const char* what);
  std::string who_ended() const;
  // Locks `use_`, unless it stays locked for that long.
  bool try_use(std::chrono::seconds patience);
  std::string what_is_wrong(double pending_for);

  const Library& library_;
  const int32_t device_, num_ranks_, rank_;
  const double time_limit_;  // of one exchange, in seconds; 0: none
  const pid_t owner_;
  std::vector<Process> processes_;  // of the ranks
  std::vector<bool> visible_;       // which of them this process can see end

  std::mutex swap_;  // held while counts are swapped, which waits: taken before `use_`
  SwapMemory swap_memory_, flags_memory_;
  int64_t next_flags_ = 0;
  bool reduces_ = false;  // after prepare_all_reduce(); under `use_`
  // Held while NCCL is told to exchange. Not a std::timed_mutex: GCC 12's sanitizer of threads misses its locks.
  std::mutex use_;
  Comm comm_ = nullptr;
  std::atomic<bool> failed_{false};
  std::mutex reason_mutex_;
  std::string reason_;
  double error_since_ =
      -1;  // seconds that the exchange was pending when NCCL first reported an error; of the watch alone
  Watch watch_;
};

sok_communicator_id make_id();

}  // namespace sok::nccl

#endif  // SOK_NCCL_COMMUNICATOR_H_
