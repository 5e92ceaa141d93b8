// SPDX-License-Identifier: Apache-2.0
// The thread pool behind sok_thread_pool_*. A run hands worker numbers out of a counter, to the caller's thread and to
// whichever threads wake in time, so a sleeping thread never holds a run up.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "common/status.h"
#include "sok/context.h"

namespace sok {
namespace {

// Checks of an atomic before a thread goes to sleep: some ten microseconds, the gap between two stages of a step.
constexpr int kSpins = 400;
constexpr int32_t kMaxThreads = 4096;

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

using Body = void (*)(void*, int32_t);

// The threads of one process. After fork() a child has none of them and makes a new Crew.
class Crew {
 public:
  explicit Crew(int32_t num_threads)
      : pid_(getpid()), num_threads_(num_threads), ids_(static_cast<size_t>(num_threads - 1)) {}
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  ~Crew() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  pid_t pid() const { return pid_; }

  void run(int32_t num_workers, Body body, void* argument) {
    if (num_workers <= 1 || num_threads_ <= 1 || is_member()) {  // a body that runs a loop of its own does so alone
      for (int32_t worker = 0; worker < num_workers; ++worker) body(argument, worker);
      return;
    }
    std::lock_guard<std::mutex> turn(turn_);
    runner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    start_threads();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = body;
      argument_ = argument;
      num_workers_ = num_workers;
      next_worker_.store(0, std::memory_order_relaxed);
      open_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    if (num_workers - 1 >= static_cast<int32_t>(threads_.size())) {
      wake_.notify_all();
    } else {
      for (int32_t i = 1; i < num_workers; ++i) wake_.notify_one();
    }
    work(body, argument, num_workers);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      open_ = false;  // threads that have not joined yet stay out
    }
    for (int i = 0; i < kSpins && active_.load(std::memory_order_acquire) != 0; ++i) pause_briefly();
    if (active_.load(std::memory_order_acquire) != 0) {
      std::unique_lock<std::mutex> lock(mutex_);
      done_.wait(lock, [this] { return active_.load(std::memory_order_acquire) == 0; });
    }
    runner_.store(std::thread::id(), std::memory_order_relaxed);
  }

 private:
  bool is_member() const {
    const std::thread::id self = std::this_thread::get_id();
    if (runner_.load(std::memory_order_relaxed) == self) return true;
    for (const std::atomic<std::thread::id>& id : ids_) {
      if (id.load(std::memory_order_relaxed) == self) return true;
    }
    return false;
  }

  void start_threads() {
    if (started_) return;
    started_ = true;
    threads_.reserve(ids_.size());
    try {
      for (size_t i = 0; i < ids_.size(); ++i) threads_.emplace_back([this, i] { live(i); });
    } catch (const std::system_error&) {
      // Fewer threads than asked for still do all the work.
    }
  }

  void work(Body body, void* argument, int32_t num_workers) {
    for (;;) {
      const int32_t worker = next_worker_.fetch_add(1, std::memory_order_relaxed);
      if (worker >= num_workers) return;
      body(argument, worker);
    }
  }

  void live(size_t index) {
    ids_[index].store(std::this_thread::get_id(), std::memory_order_relaxed);
    uint64_t seen = 0;
    for (;;) {
      for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; ++i) pause_briefly();
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
      seen = generation_.load(std::memory_order_relaxed);
      if (stop_) return;
      if (!open_) continue;
      const Body body = body_;
      void* const argument = argument_;
      const int32_t num_workers = num_workers_;
      active_.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      work(body, argument, num_workers);
      if (active_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        std::lock_guard<std::mutex> guard(mutex_);
        done_.notify_one();
      }
    }
  }

  const pid_t pid_;
  const int32_t num_threads_;
  std::mutex turn_;  // one run at a time
  std::atomic<std::thread::id> runner_;
  std::vector<std::thread> threads_;
  std::vector<std::atomic<std::thread::id>> ids_;
  bool started_ = false;

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int32_t> active_{0};
  std::atomic<int32_t> next_worker_{0};
  bool open_ = false, stop_ = false;
  Body body_ = nullptr;
  void* argument_ = nullptr;
  int32_t num_workers_ = 0;
};

}  // namespace
}  // namespace sok

struct sok_thread_pool {
  explicit sok_thread_pool(int32_t threads) : num_threads(threads), crew(new sok::Crew(threads)) {}

  // The crew of this process. One inherited through fork() is left as it is: its locks may be held for ever.
  sok::Crew& current() {
    sok::Crew* found = crew.load(std::memory_order_acquire);
    while (found->pid() != getpid()) {
      auto fresh = std::make_unique<sok::Crew>(num_threads);
      if (crew.compare_exchange_strong(found, fresh.get(), std::memory_order_acq_rel)) return *fresh.release();
    }
    return *found;
  }

  const int32_t num_threads;
  std::atomic<sok::Crew*> crew;
};

namespace {

void run_on_pool(void* opaque, int32_t num_workers, void (*body)(void*, int32_t), void* argument) {
  sok_thread_pool* pool = static_cast<sok_thread_pool*>(opaque);
  sok::Crew* crew = nullptr;
  try {
    crew = &pool->current();
  } catch (...) {  // no memory for threads: do it alone
    for (int32_t worker = 0; worker < num_workers; ++worker) body(argument, worker);
    return;
  }
  crew->run(num_workers, body, argument);
}

int32_t available_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

}  // namespace

extern "C" int sok_thread_pool_create(int32_t num_threads, sok_thread_pool** pool) {
  return SOK_ENTRY({
    SOK_CHECK(pool != nullptr, "pool is NULL");
    SOK_CHECK(num_threads >= 0 && num_threads <= sok::kMaxThreads, "num_threads is ", num_threads, ", must be in [0, ",
              sok::kMaxThreads, "]; 0 means one for each CPU");
    *pool = new sok_thread_pool(num_threads == 0 ? available_cpus() : num_threads);
  });
}

extern "C" int sok_thread_pool_destroy(sok_thread_pool* pool) {
  return SOK_ENTRY({
    if (pool == nullptr) return;
    sok::Crew* crew = pool->crew.load(std::memory_order_acquire);
    if (crew->pid() == getpid()) delete crew;
    delete pool;
  });
}

extern "C" int sok_thread_pool_executor(sok_thread_pool* pool, sok_executor* executor) {
  return SOK_ENTRY({
    SOK_CHECK(pool != nullptr, "pool is NULL");
    SOK_CHECK(executor != nullptr, "executor is NULL");
    *executor = sok_executor{pool, pool->num_threads, 0, &run_on_pool};
  });
}
