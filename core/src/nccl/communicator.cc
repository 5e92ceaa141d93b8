// SPDX-License-Identifier: Apache-2.0
#include "nccl/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <thread>
#include <utility>

#include "common/status.h"
#include "cuda/runtime.h"

namespace sok::nccl {
namespace {

using std::chrono::duration;

constexpr double kDefaultTimeout = 300;     // seconds for all ranks to join
constexpr double kDefaultTimeLimit = 1800;  // seconds that an exchange may be pending
// A process that is killed is seen to have ended a little after NCCL has lost its connection: wait for its name.
constexpr double kGrace = 3;
constexpr int kMaxBlocks = 32;  // of the device that one exchange occupies
// From this many bytes on a rank's own part is left to NCCL's kernel, which moves it beside what goes to the peers;
// below that a copy of its own takes less time.
constexpr size_t kOwnByNccl = 4 << 20;
constexpr int64_t kSwapColumns = 4096;  // that are swapped at once
constexpr int64_t kFlags = 64;          // times that errors are shared on as many streams at once
// Bytes of the reductions by which the ranks connect: NCCL chooses its algorithm and its protocol by size, and connects
// the ranks for one when it is first used.
constexpr size_t kFirstReductions[] = {8, 64 << 10, 1 << 20, 32 << 20};
constexpr double kSpin = 0.02;            // seconds of a wait without a pause
constexpr int32_t kIdMagic = 0x314b4f53;  // "SOK1"

struct IdContents {
  int32_t magic;
  int32_t version;  // of NCCL on the rank that made it
  UniqueId unique;
};
static_assert(sizeof(IdContents) == SOK_COMMUNICATOR_ID_SIZE);

double read_time_limit() {
  const char* text = std::getenv("SOK_NCCL_TIMEOUT");
  if (text == nullptr || *text == '\0') return kDefaultTimeLimit;
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  SOK_CHECK(*end == '\0' && value >= 0 && value < 1e9, "SOK_NCCL_TIMEOUT is '", text,
            "', must be a number of seconds, 0 for no limit");
  return value;
}

// Polls, so that the caller can stop waiting for what never comes.
template <typename Done>
bool wait_until(Clock::time_point deadline, Done done) {
  std::chrono::microseconds pause{50};
  while (!done()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds{10000});
  }
  return true;
}

void check_not_capturing(Stream stream) {
  SOK_CHECK_STATUS(
      SOK_FAILED_PRECONDITION, !cuda::is_capturing(stream),
      "the stream is being captured in a CUDA graph, which an exchange with other ranks cannot be part of");
}

// Of what is exchanged while a communicator is made.
struct Workspace {
  Workspace() = default;
  ~Workspace() {
    if (event != nullptr) cuda::destroy_event(event);
    if (memory != nullptr) cuda::release(memory);
    if (stream != nullptr) cuda::destroy_stream(stream);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void make(size_t bytes) {
    stream = cuda::create_stream();
    event = cuda::create_event();
    memory = static_cast<char*>(cuda::allocate(bytes));
  }

  // False: it was not done by then.
  bool is_done_by(Clock::time_point deadline) {
    cuda::record_event(event, stream);
    return wait_until(deadline, [this] { return cuda::is_done(event); });
  }

  void *stream = nullptr, *event = nullptr;
  char* memory = nullptr;
};

sok_error_record* errors_of(const sok_context& context) {
  return context.struct_size == sizeof(sok_context) ? context.errors : nullptr;
}

}  // namespace

sok_communicator_id make_id() {
  const Library& nccl = library();
  IdContents contents = {kIdMagic, nccl.version, {}};
  const Result result = nccl.get_unique_id(&contents.unique);
  if (result != kSuccess) fail(SOK_UNAVAILABLE, "NCCL gave no id: ", nccl.describe(result));
  sok_communicator_id id;
  std::memcpy(id.bytes, &contents, sizeof(contents));
  return id;
}

Communicator::Communicator(int32_t device, int32_t num_ranks, int32_t rank, double time_limit)
    : library_(library()),
      device_(device),
      num_ranks_(num_ranks),
      rank_(rank),
      time_limit_(time_limit),
      owner_(getpid()),
      processes_(static_cast<size_t>(num_ranks)),
      visible_(static_cast<size_t>(num_ranks), false),
      watch_(
          device, [this](double seconds) { return what_is_wrong(seconds); },
          [this](const std::string& reason) { give_up(reason); }) {}

Communicator::~Communicator() {
  // After finish(). A failed communicator has been freed by ncclCommAbort.
  if (comm_ == nullptr || failed_) return;
  try {
    const cuda::CurrentDevice current(device_);
    library_.comm_destroy(comm_);
  } catch (...) {  // the device is gone, and the memory on it
  }
}

std::unique_ptr<Communicator> Communicator::create(int32_t device, const sok_communicator_id& id, int32_t num_ranks,
                                                   int32_t rank, double timeout) {
  IdContents contents;
  std::memcpy(&contents, id.bytes, sizeof(contents));
  SOK_CHECK(contents.magic == kIdMagic, "id is not one that sok_communicator_id_create made");
  const Library& nccl = library();
  SOK_CHECK(contents.version == nccl.version, "rank ", rank, " has NCCL ", version_text(nccl.version), " (", nccl.path,
            "), the rank that made the id ", version_text(contents.version), "; all need the same");
  const double seconds = timeout > 0 ? timeout : kDefaultTimeout;
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(duration<double>(seconds));

  // ncclCommInitRank waits for the other ranks for as long as it takes. So it runs in a thread that can be left behind.
  struct Joining {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false, abandoned = false;
    std::exception_ptr error;
    std::unique_ptr<Communicator> communicator;
  };
  auto joining = std::make_shared<Joining>();
  joining->communicator.reset(new Communicator(device, num_ranks, rank, read_time_limit()));
  std::thread([joining, unique = contents.unique, deadline] {
    std::exception_ptr error;
    try {
      joining->communicator->join(unique, deadline);
    } catch (...) {
      error = std::current_exception();
    }
    std::unique_lock<std::mutex> lock(joining->mutex);
    joining->done = true;
    if (joining->abandoned && !error) joining->communicator->give_up("it was made too late");
    joining->error = std::move(error);  // so that whoever waits for it frees it
    joining->changed.notify_all();
  }).detach();

  std::unique_lock<std::mutex> lock(joining->mutex);
  // `join` keeps the deadline as well where it can; it may be a little late.
  if (!joining->changed.wait_until(lock, deadline + std::chrono::seconds(2), [&] { return joining->done; })) {
    joining->abandoned = true;
    fail(SOK_UNAVAILABLE, "rank ", rank, ": not all of the ", num_ranks, " ranks joined the NCCL communicator within ",
         seconds, " s");
  }
  if (joining->error) std::rethrow_exception(std::exchange(joining->error, nullptr));
  return std::move(joining->communicator);
}

void Communicator::join(const UniqueId& id, Clock::time_point deadline) {
  const cuda::CurrentDevice current(device_);
  Config config;
  config.blocking = 1;
  config.max_ctas = kMaxBlocks;
  Result result = library_.comm_init_rank_config(&comm_, num_ranks_, id, rank_, &config);
  while (result == kInProgress && Clock::now() < deadline) {  // NCCL_COMM_BLOCKING=0 in the environment
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (library_.comm_get_async_error(comm_, &result) != kSuccess) break;
  }
  if (result != kSuccess) {
    const std::string reason = library_.describe(result);
    if (comm_ != nullptr) library_.comm_abort(comm_);
    comm_ = nullptr;
    fail(SOK_UNAVAILABLE, "rank ", rank_, " cannot join the NCCL communicator of ", num_ranks_, " ranks: ", reason);
  }
  introduce(deadline);
  swap_memory_.make(num_ranks_ * kSwapColumns);
  flags_memory_.make(num_ranks_ * kFlags);
}

// Tells every rank which process this one is. It is the first exchange, which makes all connections: with each rank, in
// both directions.
void Communicator::introduce(Clock::time_point deadline) {
  processes_[static_cast<size_t>(rank_)] = this_process();
  const Process self = processes_[static_cast<size_t>(rank_)];
  const std::vector<Process> mine(static_cast<size_t>(num_ranks_), self);
  const std::vector<int64_t> ones(static_cast<size_t>(num_ranks_), 1);
  const size_t bytes = mine.size() * sizeof(Process);
  Workspace own;
  own.make(2 * bytes);
  cuda::copy(own.memory, mine.data(), bytes, own.stream);
  exchange(own.memory, ones.data(), own.memory + bytes, ones.data(), sizeof(Process), own.stream);
  cuda::copy(processes_.data(), own.memory + bytes, bytes, own.stream);
  if (!own.is_done_by(deadline)) {
    give_up("the first exchange did not end");
    own.is_done_by(Clock::now() + std::chrono::seconds(10));
    fail(SOK_UNAVAILABLE, "rank ", rank_, ": the first exchange over NCCL did not end in time");
  }
  for (int32_t rank = 0; rank < num_ranks_; ++rank) {
    const Process& peer = processes_[static_cast<size_t>(rank)];
    // What does not seem to live now cannot be seen (/proc may hide it).
    visible_[static_cast<size_t>(rank)] = rank != rank_ && can_see(self, peer) && !has_ended(peer);
  }
}

bool Communicator::is_forked() const { return getpid() != owner_; }

void Communicator::check() {
  if (!failed_) return;
  std::lock_guard<std::mutex> lock(reason_mutex_);
  fail(SOK_UNAVAILABLE, "rank ", rank_, ": the exchange with the other ranks has failed: ", reason_);
}

void Communicator::all_to_all(const sok_context& context, const char* send, const int64_t* send_counts, char* receive,
                              const int64_t* receive_counts, size_t item) {
  const cuda::CurrentDevice current(device_);
  check_not_capturing(context.stream);
  std::lock_guard<std::mutex> lock(use_);
  check();
  const Watch::Call call(watch_);
  exchange(send, send_counts, receive, receive_counts, item, context.stream);
  watch_.add(context.stream, errors_of(context));
}

void Communicator::swap_counts(const sok_context& context, const sok_tensor& counts, int64_t* sent, int64_t* received) {
  const cuda::CurrentDevice current(device_);
  check_not_capturing(context.stream);
  const std::lock_guard<std::mutex> swapping(swap_);
  const int64_t columns = counts.shape[1];
  for (int64_t first = 0; first < columns; first += kSwapColumns) {
    const int64_t n = std::min(kSwapColumns, columns - first);
    enqueue_swap(context, counts, first, n);
    wait(context.stream);
    check();
    const int64_t* results = swap_memory_.results();
    for (int64_t* const to : {sent + first, received + first}) {
      for (int64_t rank = 0; rank < num_ranks_; ++rank, results += n) std::copy_n(results, n, to + rank * columns);
    }
  }
}

void Communicator::enqueue_swap(const sok_context& context, const sok_tensor& counts, int64_t first, int64_t n) {
  const int64_t num_cells = num_ranks_ * n;
  const auto bytes = static_cast<size_t>(num_cells) * sizeof(int64_t);
  std::lock_guard<std::mutex> lock(use_);
  check();
  const Watch::Call call(watch_);
  int64_t* const messages = swap_memory_.messages();
  const bool last = first + n == counts.shape[1];
  sok_error_record* const errors = errors_of(context);
  cuda::write_counts(static_cast<const int64_t*>(counts.data) + first, counts.shape[1], last ? errors : nullptr,
                     num_cells, n, messages, context.stream);
  const std::vector<int64_t> each(static_cast<size_t>(num_ranks_), n);
  exchange(reinterpret_cast<const char*>(messages), each.data(), reinterpret_cast<char*>(messages + num_cells),
           each.data(), sizeof(int64_t), context.stream);
  cuda::copy(swap_memory_.results(), messages, 2 * bytes, context.stream);
  watch_.add(context.stream, errors);
}

void Communicator::share_errors(const sok_context& context, bool failed) {
  const cuda::CurrentDevice current(device_);
  check_not_capturing(context.stream);
  std::lock_guard<std::mutex> lock(use_);
  check();
  const Watch::Call call(watch_);
  int64_t* const sent = flags_memory_.messages() + 2 * num_ranks_ * (next_flags_++ % kFlags);
  int64_t* const received = sent + num_ranks_;
  const std::vector<int64_t> ones(static_cast<size_t>(num_ranks_), 1);
  cuda::write_flags(context.errors, failed, num_ranks_, sent, context.stream);
  exchange(reinterpret_cast<const char*>(sent), ones.data(), reinterpret_cast<char*>(received), ones.data(),
           sizeof(int64_t), context.stream);
  cuda::read_flags(received, num_ranks_, rank_, context.errors, context.stream);
  watch_.add(context.stream, context.errors);
}

void Communicator::prepare_all_reduce() {
  const cuda::CurrentDevice current(device_);
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(duration<double>(kDefaultTimeout));
  std::lock_guard<std::mutex> lock(use_);
  check();
  if (reduces_) return;
  const Watch::Call call(watch_);
  Workspace own;
  own.make(*std::max_element(std::begin(kFirstReductions), std::end(kFirstReductions)));
  for (const size_t bytes : kFirstReductions) {
    const sok_tensor array = {own.memory, SOK_FLOAT32, 1, {static_cast<int64_t>(bytes / sizeof(float)), 0}, 0};
    reduce(kSum, kFloat32, 1, &array, &array, own.stream);
  }
  if (!own.is_done_by(deadline)) {
    give_up("the first reductions did not end", true);
    own.is_done_by(Clock::now() + std::chrono::seconds(10));
    check();
  }
  reduces_ = true;
}

void Communicator::all_reduce(const sok_context& context, Reduction reduction, DataType type, int32_t num_arrays,
                              const sok_tensor* send, const sok_tensor* receive) {
  const cuda::CurrentDevice current(device_);
  check_not_capturing(context.stream);
  std::lock_guard<std::mutex> lock(use_);
  check();
  SOK_CHECK_STATUS(
      SOK_FAILED_PRECONDITION, reduces_,
      "the communicator has no connections for reductions: call sok_communicator_prepare_all_reduce first");
  const Watch::Call call(watch_);
  reduce(reduction, type, num_arrays, send, receive, context.stream);
  watch_.add(context.stream, errors_of(context));
}

void Communicator::reduce(Reduction reduction, DataType type, int32_t num_arrays, const sok_tensor* send,
                          const sok_tensor* receive, Stream stream) {
  settle(library_.group_start(), "ncclGroupStart");
  Result first_error = kSuccess;
  for (int32_t i = 0; i < num_arrays && (first_error == kSuccess || first_error == kInProgress); ++i) {
    const auto n = static_cast<size_t>(send[i].shape[0]);
    if (n == 0) continue;
    first_error = library_.all_reduce(send[i].data, receive[i].data, n, type, reduction, comm_, stream);
  }
  const Result result = library_.group_end();
  settle(first_error == kSuccess || first_error == kInProgress ? result : first_error, "ncclGroupEnd");
}

// The stream may hold what never ends although this communicator's exchange was ended: a collective of the framework,
// for example.
void Communicator::wait(Stream stream) {
  const auto since = Clock::now();
  auto failed_since = Clock::time_point::max();
  while (!cuda::is_idle(stream)) {
    const auto now = Clock::now();
    if (failed_) failed_since = std::min(failed_since, now);
    if (failed_ && duration<double>(now - failed_since).count() > kGrace) {
      swap_memory_.abandon();
      check();
    }
    if (duration<double>(now - since).count() > kSpin) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void Communicator::exchange(const char* send, const int64_t* send_counts, char* receive, const int64_t* receive_counts,
                            size_t item, Stream stream) {
  std::vector<size_t> from(static_cast<size_t>(num_ranks_)), to(static_cast<size_t>(num_ranks_));
  bool alone = true;
  size_t sent = 0, received = 0;
  for (int32_t rank = 0; rank < num_ranks_; ++rank) {
    from[static_cast<size_t>(rank)] = sent;
    to[static_cast<size_t>(rank)] = received;
    sent += static_cast<size_t>(send_counts[rank]) * item;
    received += static_cast<size_t>(receive_counts[rank]) * item;
    alone = alone && (rank == rank_ || (send_counts[rank] == 0 && receive_counts[rank] == 0));
  }
  if (!alone) exchange_with_peers(send, send_counts, from, receive, receive_counts, to, item, stream);
  const size_t own = static_cast<size_t>(send_counts[rank_]) * item;
  if (own > 0 && (alone || own < kOwnByNccl)) {
    cuda::copy(receive + to[static_cast<size_t>(rank_)], send + from[static_cast<size_t>(rank_)], own, stream);
  }
}

void Communicator::exchange_with_peers(const char* send, const int64_t* send_counts, const std::vector<size_t>& from,
                                       char* receive, const int64_t* receive_counts, const std::vector<size_t>& to,
                                       size_t item, Stream stream) {
  settle(library_.group_start(), "ncclGroupStart");
  Result first_error = kSuccess;
  const bool with_own = static_cast<size_t>(send_counts[rank_]) * item >= kOwnByNccl;
  for (int32_t step = with_own ? 0 : 1; step < num_ranks_; ++step) {  // each rank begins with another peer
    const int32_t target = (rank_ + step) % num_ranks_, source = (rank_ + num_ranks_ - step) % num_ranks_;
    const size_t send_bytes = static_cast<size_t>(send_counts[target]) * item;
    const size_t receive_bytes = static_cast<size_t>(receive_counts[source]) * item;
    if (send_bytes > 0 && first_error == kSuccess) {
      first_error = library_.send(send + from[static_cast<size_t>(target)], send_bytes, kInt8, target, comm_, stream);
    }
    if (receive_bytes > 0 && first_error == kSuccess) {
      first_error =
          library_.recv(receive + to[static_cast<size_t>(source)], receive_bytes, kInt8, source, comm_, stream);
    }
  }
  const Result result = library_.group_end();
  settle(first_error == kSuccess || first_error == kInProgress ? result : first_error, "ncclGroupEnd");
}

void Communicator::settle(Result result, const char* what) {
  while (result == kInProgress && !failed_) {
    std::this_thread::yield();
    if (library_.comm_get_async_error(comm_, &result) != kSuccess) break;
  }
  if (result == kSuccess) return;
  const std::string ended = who_ended();
  give_up((ended.empty() ? "" : ended + "; ") + what + ": " + library_.describe(result), true);
  check();
}

std::string Communicator::who_ended() const {
  std::string ended;
  for (int32_t rank = 0; rank < num_ranks_; ++rank) {
    const Process& peer = processes_[static_cast<size_t>(rank)];
    if (!visible_[static_cast<size_t>(rank)] || !has_ended(peer)) continue;
    ended +=
        (ended.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (process " + std::to_string(peer.pid) + ")";
  }
  if (!ended.empty()) ended += " of this host ended in the middle of an exchange; its own output says why";
  return ended;
}

std::string Communicator::what_is_wrong(double pending_for) {
  std::string ended = who_ended();
  if (!ended.empty()) return ended;
  if (use_.try_lock()) {  // else a thread is inside NCCL; perhaps for good, so do not wait for it
    Result result = kSuccess;
    const Result status = failed_ ? kSuccess : library_.comm_get_async_error(comm_, &result);
    use_.unlock();
    if (status != kSuccess) result = status;
    const bool wrong = result != kSuccess && result != kInProgress;
    if (!wrong) {
      error_since_ = -1;
    } else if (error_since_ < 0 || pending_for < error_since_) {
      error_since_ = pending_for;
    } else if (pending_for - error_since_ > kGrace) {
      return "NCCL reports " + library_.describe(result);
    }
  }
  if (time_limit_ > 0 && pending_for > time_limit_) {
    return "an exchange has been pending for " + std::to_string(static_cast<int64_t>(pending_for)) +
           " s; a rank does not take part in it or its host is gone (SOK_NCCL_TIMEOUT is the limit)";
  }
  return "";
}

void Communicator::give_up(const std::string& reason, bool inside) {
  {
    std::lock_guard<std::mutex> lock(reason_mutex_);
    if (failed_) return;
    reason_ = reason;
    failed_ = true;
  }
  // Before the exchange ends: what comes after it on its stream must find the records set.
  watch_.flag_errors();
  const cuda::CurrentDevice current(device_);
  // Nobody should be inside NCCL then. But a call that NCCL does not let go, since its peer is gone, is let go by this.
  // It may take as long as a stream that never ends, so it does not hold the lock: who comes now finds that it failed.
  if (!inside && try_use(std::chrono::seconds(5))) use_.unlock();
  if (comm_ != nullptr) library_.comm_abort(comm_);
}

bool Communicator::try_use(std::chrono::seconds patience) {
  return wait_until(Clock::now() + patience, [this] { return use_.try_lock(); });
}

bool Communicator::finish() {
  try {
    while (!failed_ && watch_.is_pending()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } catch (const Error&) {  // the device has failed: nothing will be pending any more
  }
  // A thread that is inside give_up() still has to come out.
  if (try_use(std::chrono::seconds(60))) use_.unlock();
  return watch_.stop(60);
}

}  // namespace sok::nccl
