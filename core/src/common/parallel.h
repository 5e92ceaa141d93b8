// SPDX-License-Identifier: Apache-2.0
// Parallel loops on the executor of the call's context.
#ifndef SOK_COMMON_PARALLEL_H_
#define SOK_COMMON_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <vector>

#include "sok/context.h"

namespace sok {

// Runs f(task, worker) for each task in [0, num_tasks). Tasks are handed out in ascending order, one at a time, to at
// most executor.num_workers workers; `worker` tells those apart. Nothing may depend on tasks running at the same time.
// When tasks throw, the exception of the lowest one is thrown here, whatever the number of workers.
template <typename F>
void parallel_for(const sok_context& context, int64_t num_tasks, F&& f) {
  const int32_t num_workers =
      static_cast<int32_t>(std::min<int64_t>(num_tasks, std::max<int32_t>(1, context.executor.num_workers)));
  if (num_workers <= 1 || context.executor.run == nullptr) {
    for (int64_t task = 0; task < num_tasks; ++task) f(task, 0);
    return;
  }
  struct State {
    F* f;
    int64_t num_tasks;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> failed{INT64_MAX};
    std::mutex mutex;
    std::exception_ptr exception;
  } state;
  state.f = &f;
  state.num_tasks = num_tasks;
  context.executor.run(
      context.executor.opaque, num_workers,
      [](void* argument, int32_t worker) {
        State& state = *static_cast<State*>(argument);
        for (;;) {
          const int64_t task = state.next.fetch_add(1, std::memory_order_relaxed);
          if (task >= state.num_tasks || task > state.failed.load(std::memory_order_relaxed)) return;
          try {
            (*state.f)(task, worker);
          } catch (...) {
            std::lock_guard<std::mutex> lock(state.mutex);
            if (task < state.failed.load(std::memory_order_relaxed)) {
              state.failed.store(task, std::memory_order_relaxed);
              state.exception = std::current_exception();
            }
          }
        }
      },
      &state);
  if (state.exception) std::rethrow_exception(state.exception);
}

inline int32_t num_workers(const sok_context& context) {
  return context.executor.run == nullptr ? 1 : std::max<int32_t>(1, context.executor.num_workers);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Ranges of several lengths cut into chunks, numbered through: the tasks of one parallel loop over all of them.
class Chunks {
 public:
  struct Range {
    int64_t item, begin, end;
  };

  // Appends an item of `length`, cut into pieces of `chunk` (>= 1).
  void add(int64_t length, int64_t chunk) {
    lengths_.push_back(length);
    chunks_.push_back(chunk);
    ends_.push_back(count() + ceil_div(length, chunk));
  }
  int64_t count() const { return ends_.empty() ? 0 : ends_.back(); }
  // Tasks of `item` are [first(item), first(item + 1)).
  int64_t first(int64_t item) const { return item == 0 ? 0 : ends_[item - 1]; }
  Range operator[](int64_t task) const {
    const int64_t item = std::upper_bound(ends_.begin(), ends_.end(), task) - ends_.begin();
    const int64_t begin = (task - first(item)) * chunks_[item];
    return {item, begin, std::min(begin + chunks_[item], lengths_[item])};
  }

 private:
  std::vector<int64_t> lengths_, chunks_, ends_;
};

}  // namespace sok

#endif  // SOK_COMMON_PARALLEL_H_
