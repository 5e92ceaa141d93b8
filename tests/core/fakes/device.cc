// SPDX-License-Identifier: Apache-2.0
// core/src/cuda/runtime.h over host memory: a stream is a thread that runs what was enqueued, in order.
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "common/error_record.h"
#include "common/status.h"
#include "cuda/nvtx.h"
#include "cuda/runtime.h"
#include "sok/device.h"
#include "stream.h"

namespace {

class Stream : public FakeStream {
 public:
  Stream() : FakeStream{&Stream::Enqueue}, thread_([this] { Run(); }) {}
  ~Stream() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void Add(std::function<void()> work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_.push_back(std::move(work));
    }
    changed_.notify_all();
  }

  void Synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return work_.empty() && !busy_; });
  }

  bool Idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return work_.empty() && !busy_;
  }

  std::atomic<bool> capturing{false};

 private:
  static void Enqueue(FakeStream* stream, void (*run)(void*), void* argument) {
    static_cast<Stream*>(stream)->Add([run, argument] { run(argument); });
  }

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return closing_ || !work_.empty(); });
      if (work_.empty()) return;
      std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      busy_ = true;
      lock.unlock();
      work();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool busy_ = false, closing_ = false;
  std::thread thread_;
};

struct Marks {
  std::atomic<int> recorded{0}, done{0};
};
using Event = std::shared_ptr<Marks>;  // as in CUDA, one may be destroyed while a stream has yet to reach it

std::atomic<int> broken{0};

std::mutex ranges_mutex;
std::string ranges;  // of profilers: "name( " where one begins, ") " where one ends

Stream* ToStream(void* stream) { return static_cast<Stream*>(static_cast<FakeStream*>(stream)); }

}  // namespace

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

FAKE_EXPORT void* fake_stream_create() { return static_cast<FakeStream*>(new Stream); }
FAKE_EXPORT void fake_stream_synchronize(void* stream) { ToStream(stream)->Synchronize(); }
FAKE_EXPORT void fake_stream_capture(void* stream, int capturing) { ToStream(stream)->capturing = capturing != 0; }
// Work that takes that long, ahead of what is enqueued later.
FAKE_EXPORT void fake_stream_sleep(void* stream, double seconds) {
  ToStream(stream)->Add([seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
}
// From now on the device answers with an error.
FAKE_EXPORT void fake_device_break() { broken = 1; }
FAKE_EXPORT const char* fake_ranges() { return ranges.c_str(); }

namespace sok::cuda {

void push_range(const char* name) noexcept {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  ranges += std::string(name) + "( ";
}
void pop_range() noexcept {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  ranges += ") ";
}

CurrentDevice::CurrentDevice(int32_t device) : device_(device) {
  SOK_CHECK(device >= 0 && device < 8, "no CUDA device ", device, "; this host has 8");
}
CurrentDevice::~CurrentDevice() = default;
void enter_watching_thread(int32_t) {}
std::string device_uuid(int32_t device) { return "fake" + std::to_string(device); }
void* create_stream() { return fake_stream_create(); }
void destroy_stream(void* stream) noexcept { delete ToStream(stream); }
void* allocate(size_t bytes) { return std::malloc(bytes); }
void release(void* memory) noexcept { std::free(memory); }
void* create_event() { return new Event(std::make_shared<Marks>()); }
void* allocate_page_locked(size_t bytes) { return std::malloc(bytes); }
void release_page_locked(void* memory) noexcept { std::free(memory); }
void destroy_event(void* event) noexcept { delete static_cast<Event*>(event); }

void record_event(void* event, void* stream) {
  const Event found = *static_cast<Event*>(event);
  const int number = ++found->recorded;
  ToStream(stream)->Add([found, number] {  // of several streams an earlier record may be reached later
    int done = found->done;
    while (done < number && !found->done.compare_exchange_weak(done, number)) {
    }
  });
}

bool is_done(void* event) {
  if (broken != 0) fail(SOK_INTERNAL, "CUDA: an illegal memory access was encountered");
  const Marks& found = **static_cast<Event*>(event);
  return found.done >= found.recorded;
}

// Nothing is ever enqueued on the default stream.
bool is_capturing(void* stream) { return stream != nullptr && ToStream(stream)->capturing; }

void copy(void* to, const void* from, size_t bytes, void* stream) {
  ToStream(stream)->Add([=] { std::memcpy(to, from, bytes); });
}

void wait_for_event(void* event) {
  while (!is_done(event)) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

void make_wait(void* stream, void* event) {
  const Event found = *static_cast<Event*>(event);
  const int number = found->recorded;
  ToStream(stream)->Add([found, number] {
    while (found->done < number) std::this_thread::sleep_for(std::chrono::microseconds(50));
  });
}

bool is_idle(void* stream) { return ToStream(stream)->Idle(); }

void wait(void* stream) {
  if (stream != nullptr) ToStream(stream)->Synchronize();
}

void write_counts(const int64_t* counts, int64_t stride, const sok_error_record* errors, int64_t num_cells,
                  int64_t num_columns, int64_t* message, void* stream) {
  ToStream(stream)->Add([=] {
    for (int64_t i = 0; i < num_cells; ++i) {
      const bool failed = (i + 1) % num_columns == 0 && sok_error_record_is_empty(errors) == 0;
      message[i] = failed ? 1 : counts[i / num_columns * stride + i % num_columns];
    }
  });
}

void write_flags(const sok_error_record* errors, bool failed, int64_t n, int64_t* flags, void* stream) {
  ToStream(stream)->Add([=] {
    for (int64_t i = 0; i < n; ++i) flags[i] = failed || sok_error_record_is_empty(errors) == 0 ? 1 : 0;
  });
}

void read_flags(const int64_t* flags, int64_t n, int64_t rank, sok_error_record* errors, void* stream) {
  ToStream(stream)->Add([=] {
    for (int64_t i = 0; i < n; ++i) {
      if (i == rank || flags[i] == 0 || sok_error_record_is_empty(errors) == 0) continue;
      errors->fault = static_cast<int32_t>(Fault::kPeer), errors->table = -1, errors->value = i;
      std::atomic_ref<uint32_t>(errors->taken).store(1);
    }
  });
}

}  // namespace sok::cuda

// Also where the core that this library needs was built without CUDA.
extern "C" int sok_built_with_cuda(void) { return 1; }
