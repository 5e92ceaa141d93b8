// SPDX-License-Identifier: Apache-2.0
#include "nccl/watch.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <utility>

#include "common/error_record.h"
#include "common/status.h"
#include "cuda/runtime.h"

namespace sok::nccl {
namespace {

using std::chrono::duration;
using std::chrono::steady_clock;

constexpr std::chrono::seconds kTick{1};
constexpr double kPatience = 3;  // seconds that an operation may be pending without questions

// The threads of this process, which must not call CUDA while the process ends: at that time CUDA is taken down. Made
// after CUDA was used for the first time, so that it is destroyed before.
class Threads {
 public:
  static Threads& all() {
    static Threads threads;
    return threads;
  }
  ~Threads() {
    if (getpid() != owner_) return;  // a child of fork() has none of them
    for (Watch* watch : list()) watch->stop(2);
  }
  void add(Watch* watch) {
    std::lock_guard<std::mutex> lock(mutex_);
    watches_.insert(watch);
  }
  void remove(Watch* watch) {
    std::lock_guard<std::mutex> lock(mutex_);
    watches_.erase(watch);
  }

 private:
  std::vector<Watch*> list() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {watches_.begin(), watches_.end()};
  }

  const pid_t owner_ = getpid();
  std::mutex mutex_;
  std::set<Watch*> watches_;
};

}  // namespace

Watch::Watch(int32_t device, std::function<std::string(double)> what_is_wrong,
             std::function<void(const std::string&)> give_up)
    : device_(device), what_is_wrong_(std::move(what_is_wrong)), give_up_(std::move(give_up)) {}

Watch::~Watch() {
  for (Pending* pending : {&first_, &later_}) {
    if (pending->event != nullptr) cuda::destroy_event(pending->event);
  }
}

void Watch::add(void* stream, sok_error_record* errors) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Pending* pending : {&first_, &later_}) {
    if (pending->event == nullptr) pending->event = cuda::create_event();
  }
  Pending& pending = first_.used ? later_ : first_;
  cuda::record_event(pending.event, stream);
  if (!pending.used) pending.since = steady_clock::now();
  pending.used = true;
  const bool known = std::find(pending.errors.begin(), pending.errors.end(), errors) != pending.errors.end();
  if (errors != nullptr && !known) pending.errors.push_back(errors);
}

void Watch::begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  calling_ = true;
  called_ = steady_clock::now();
  if (!thread_.joinable() && !stopping_) {
    Threads::all().add(this);
    running_ = true;
    thread_ = std::thread([this] { run(); });
  }
}

void Watch::end() {
  std::lock_guard<std::mutex> lock(mutex_);
  calling_ = false;
}

double Watch::pending_for() const {
  const auto now = steady_clock::now();
  const double called = calling_ ? duration<double>(now - called_).count() : 0;
  return std::max(called, first_.used ? duration<double>(now - first_.since).count() : 0);
}

void Watch::advance() {
  while (first_.used && cuda::is_done(first_.event)) {
    first_.used = false;
    first_.errors.clear();
    std::swap(first_, later_);
    first_.since = steady_clock::now();
  }
}

bool Watch::is_pending() {
  std::lock_guard<std::mutex> lock(mutex_);
  advance();
  return first_.used;
}

void Watch::flag_errors() {
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    advance();
  } catch (const Error&) {  // the device has failed, and everything pending with it
  }
  for (const Pending* pending : {&first_, &later_}) {
    for (sok_error_record* errors : pending->errors) {
      std::atomic_ref<int32_t>(errors->ended).store(static_cast<int32_t>(Fault::kExchange), std::memory_order_release);
    }
  }
}

void Watch::run() {
  std::string reason;
  std::unique_lock<std::mutex> lock(mutex_);
  try {
    cuda::enter_watching_thread(device_);
    while (!stopping_ && reason.empty()) {
      wake_.wait_for(lock, kTick, [this] { return stopping_; });
      if (stopping_) break;
      advance();
      const double seconds = pending_for();
      if (seconds > kPatience) reason = what_is_wrong_(seconds);
    }
  } catch (const Error& error) {
    reason = error.message();
  } catch (const std::exception& error) {
    reason = error.what();
  }
  if (!reason.empty() && !stopping_) {
    lock.unlock();
    try {
      give_up_(reason);
    } catch (...) {  // out of memory: what is pending stays pending
    }
    lock.lock();
  }
  running_ = false;
  ended_.notify_all();
}

bool Watch::stop(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  stopping_ = true;
  wake_.notify_all();
  if (!ended_.wait_for(lock, duration<double>(seconds), [this] { return !running_; })) return false;
  lock.unlock();
  if (thread_.joinable()) thread_.join();
  Threads::all().remove(this);
  return true;
}

}  // namespace sok::nccl
