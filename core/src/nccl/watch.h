// SPDX-License-Identifier: Apache-2.0
// A thread that looks at what is pending on a device, and asks somebody else whether it will ever end.
#ifndef SOK_NCCL_WATCH_H_
#define SOK_NCCL_WATCH_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "sok/error_record.h"

namespace sok::nccl {

class Watch {
 public:
  // what_is_wrong(seconds): asked from the thread about an operation that has been pending for that long; "" for
  // nothing. give_up(reason): called from the thread at most once.
  Watch(int32_t device, std::function<std::string(double)> what_is_wrong,
        std::function<void(const std::string&)> give_up);
  ~Watch();  // after stop() that returned true
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // A call that enqueues an operation, which may itself not come back: to be made before it. The first one starts the
  // thread.
  class Call {
   public:
    explicit Call(Watch& watch) : watch_(watch) { watch_.begin(); }
    ~Call() { watch_.end(); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    Watch& watch_;
  };

  // To be called when an operation has been enqueued on `stream` of the current device. `errors` may be NULL.
  void add(void* stream, sok_error_record* errors);

  // Whether an operation is pending. Throws Error when the device has failed.
  bool is_pending();

  // Sets the error records of the pending operations.
  void flag_errors();

  // Ends the thread. False when it does not come back within `seconds`: then it goes on and this object must live.
  bool stop(double seconds);

 private:
  // Operations of which the last one is marked by an event.
  struct Pending {
    void* event = nullptr;
    bool used = false;
    std::chrono::steady_clock::time_point since;
    std::vector<sok_error_record*> errors;
  };

  void begin();
  void end();
  void run();
  void advance();
  double pending_for() const;

  const int32_t device_;
  const std::function<std::string(double)> what_is_wrong_;
  const std::function<void(const std::string&)> give_up_;

  std::mutex mutex_;
  std::condition_variable wake_, ended_;
  std::thread thread_;
  bool stopping_ = false;
  bool running_ = false;
  // Operations on one communicator end in their order, so two marks are enough: one that is being waited for, and one
  // that moves on with each later operation and is waited for next.
  Pending first_, later_;
  bool calling_ = false;
  std::chrono::steady_clock::time_point called_;
};

}  // namespace sok::nccl

#endif  // SOK_NCCL_WATCH_H_
