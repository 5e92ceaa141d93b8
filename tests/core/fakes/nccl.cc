// SPDX-License-Identifier: Apache-2.0
// A libnccl.so.2 for tests: sends and receives between processes over a file that they map, on the streams of the fake
// device. Like NCCL's kernels, an operation waits for its peer until it is aborted.
//
// Environment: FAKE_NCCL_FOLDER (of the files), FAKE_NCCL_VERSION, FAKE_NCCL_INIT ("hang" or "refuse").
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stream.h"

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kInvalidUsage = 5;
constexpr int kInt32 = 2, kInt64 = 4, kFloat32 = 7, kFloat64 = 8;  // of ncclDataType_t
constexpr int kMax = 2, kMin = 3, kMean = 4;                       // of ncclRedOp_t
constexpr int kMaxRanks = 4;

struct Id {
  char bytes[128];
};

struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};

struct Channel {  // from one rank to another
  std::atomic<uint64_t> written, read;
  char data[1 << 16];
};

struct Shared {
  std::atomic<int> arrived;
  Channel channels[kMaxRanks][kMaxRanks];
};

struct Transfer {
  bool sends;
  char* data;
  size_t left;
  Channel* channel;

  bool Progress() {
    const uint64_t size = sizeof(channel->data);
    const uint64_t written = channel->written, read = channel->read;
    const uint64_t position = (sends ? written : read) % size;
    const uint64_t possible = std::min(sends ? size - (written - read) : written - read, size - position);
    const size_t bytes = std::min<uint64_t>(possible, left);
    if (bytes == 0) return left == 0;
    if (sends) {
      std::memcpy(channel->data + position, data, bytes);
      channel->written += bytes;
    } else {
      std::memcpy(data, channel->data + position, bytes);
      channel->read += bytes;
    }
    data += bytes;
    left -= bytes;
    return left == 0;
  }
};

std::atomic<int> async_error{0}, group_error{0}, group_hangs{0}, aborts{0}, destroys{0}, groups{0}, transfers{0};

}  // namespace

struct Comm {
  int rank, num_ranks;
  Shared* shared;
  std::atomic<bool> aborted{false};
  std::atomic<int> running{0};
  std::atomic<int> issued{0}, ended{0};
};

namespace {

struct Group {
  Comm* comm;
  std::vector<Transfer> transfers;
  std::vector<std::function<void()>> after;  // when all transfers are done
  int number = 0;                            // operations of one communicator run in their order, on whatever streams
};

thread_local int depth = 0;
thread_local Group* group = nullptr;
thread_local FakeStream* group_stream = nullptr;

void RunGroup(void* argument) {
  auto* work = static_cast<Group*>(argument);
  while (work->comm->ended != work->number && !work->comm->aborted) usleep(50);
  bool done = false;
  while (!done && !work->comm->aborted) {
    done = true;
    std::set<std::pair<Channel*, bool>> busy;  // transfers of one channel and direction run in their order
    for (Transfer& transfer : work->transfers) {
      const std::pair<Channel*, bool> way{transfer.channel, transfer.sends};
      if (busy.count(way) != 0 || transfer.Progress()) continue;
      busy.insert(way);
      done = false;
    }
    if (!done) usleep(50);
  }
  for (const auto& finish : work->after) {
    if (!work->comm->aborted) finish();
  }
  ++work->comm->ended;
  --work->comm->running;
  delete work;
}

int Add(Comm* comm, bool sends, char* data, size_t bytes, int peer, void* stream) {
  if (depth == 0 || peer < 0 || peer >= comm->num_ranks || bytes == 0) return kInvalidArgument;
  if (group == nullptr) group = new Group{comm, {}, {}};
  group_stream = static_cast<FakeStream*>(stream);
  Channel* channel = sends ? &comm->shared->channels[comm->rank][peer] : &comm->shared->channels[peer][comm->rank];
  group->transfers.push_back({sends, data, bytes, channel});
  ++transfers;
  return kSuccess;
}

// What each rank sent, n elements of T a rank, reduced element by element.
template <typename T>
void Reduce(const char* sent, int num_ranks, size_t n, int reduction, char* result) {
  const auto* from = reinterpret_cast<const T*>(sent);
  for (size_t i = 0; i < n; ++i) {
    T value = from[i];
    for (int rank = 1; rank < num_ranks; ++rank) {
      const T other = from[static_cast<size_t>(rank) * n + i];
      value = reduction == kMax   ? std::max(value, other)
              : reduction == kMin ? std::min(value, other)
                                  : static_cast<T>(value + other);
    }
    if (reduction == kMean) value = static_cast<T>(value / static_cast<T>(num_ranks));
    reinterpret_cast<T*>(result)[i] = value;
  }
}

}  // namespace

FAKE_EXPORT int ncclAllReduce(const void* send, void* receive, size_t count, int type, int reduction, Comm* comm,
                              void* stream) {
  const size_t item = type == kInt32 || type == kFloat32 ? 4 : type == kInt64 || type == kFloat64 ? 8 : 0;
  if (depth == 0 || count == 0 || item == 0) return kInvalidArgument;
  const size_t bytes = count * item;
  auto sent = std::make_shared<std::vector<char>>(bytes * static_cast<size_t>(comm->num_ranks));
  for (int rank = 0; rank < comm->num_ranks; ++rank) {  // its own part goes the same way as the others
    Add(comm, true, const_cast<char*>(static_cast<const char*>(send)), bytes, rank, stream);
    Add(comm, false, sent->data() + static_cast<size_t>(rank) * bytes, bytes, rank, stream);
  }
  const int num_ranks = comm->num_ranks;
  group->after.push_back([=] {
    auto* const result = static_cast<char*>(receive);
    if (type == kInt32) Reduce<int32_t>(sent->data(), num_ranks, count, reduction, result);
    if (type == kInt64) Reduce<int64_t>(sent->data(), num_ranks, count, reduction, result);
    if (type == kFloat32) Reduce<float>(sent->data(), num_ranks, count, reduction, result);
    if (type == kFloat64) Reduce<double>(sent->data(), num_ranks, count, reduction, result);
  });
  return kSuccess;
}

FAKE_EXPORT void fake_nccl_set_async_error(int result) { async_error = result; }
FAKE_EXPORT void fake_nccl_fail_next_group(int result) { group_error = result; }
FAKE_EXPORT void fake_nccl_hang_next_group() { group_hangs = 1; }
FAKE_EXPORT int fake_nccl_aborts() { return aborts; }
FAKE_EXPORT int fake_nccl_destroys() { return destroys; }
FAKE_EXPORT int fake_nccl_groups() { return groups; }
FAKE_EXPORT int fake_nccl_transfers() { return transfers; }

FAKE_EXPORT int ncclGetVersion(int* version) {
  const char* wanted = std::getenv("FAKE_NCCL_VERSION");
  *version = wanted != nullptr ? std::atoi(wanted) : 22803;
  return kSuccess;
}

FAKE_EXPORT int ncclGetUniqueId(Id* id) {
  std::memset(id->bytes, 0, sizeof(id->bytes));
  std::snprintf(id->bytes, sizeof(id->bytes), "fake-%d-%ld", getpid(), random());
  return kSuccess;
}

FAKE_EXPORT int ncclCommInitRankConfig(Comm** comm, int num_ranks, Id id, int rank, const Config* config) {
  if (config->magic != 0xcafebeef || config->size < sizeof(Config) || num_ranks > kMaxRanks) return kInvalidArgument;
  const char* behaviour = std::getenv("FAKE_NCCL_INIT");
  if (behaviour != nullptr && std::strcmp(behaviour, "refuse") == 0) return kInvalidUsage;
  while (behaviour != nullptr && std::strcmp(behaviour, "hang") == 0) sleep(1);
  const std::string path = std::string(std::getenv("FAKE_NCCL_FOLDER")) + "/" + id.bytes;
  const int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) return kSystemError;
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return kSystemError;
  auto* made = new Comm{rank, num_ranks, static_cast<Shared*>(memory)};
  ++made->shared->arrived;
  while (made->shared->arrived < num_ranks) usleep(1000);
  *comm = made;
  return kSuccess;
}

FAKE_EXPORT int ncclCommDestroy(Comm* comm) {
  if (comm->running != 0) return kInvalidUsage;
  ++destroys;
  delete comm;
  return kSuccess;
}

FAKE_EXPORT int ncclCommAbort(Comm* comm) {
  ++aborts;
  comm->aborted = true;
  while (comm->running != 0) usleep(100);
  return kSuccess;  // keeps the memory: another thread may be inside, as with NCCL
}

FAKE_EXPORT int ncclCommGetAsyncError(Comm*, int* result) {
  *result = async_error;
  return kSuccess;
}

FAKE_EXPORT int ncclGroupStart() {
  ++depth;
  return kSuccess;
}

FAKE_EXPORT int ncclGroupEnd() {
  if (--depth > 0) return kSuccess;
  Group* work = group;
  group = nullptr;
  if (const int error = group_error.exchange(0); error != 0) {
    delete work;
    return error;
  }
  if (work == nullptr) return kSuccess;
  ++groups;
  ++work->comm->running;
  if (group_hangs.exchange(0) != 0) {
    while (!work->comm->aborted) usleep(100);
    --work->comm->running;
    delete work;
    return kSystemError;
  }
  work->number = work->comm->issued++;
  group_stream->enqueue(group_stream, RunGroup, work);
  return kSuccess;
}

FAKE_EXPORT int ncclSend(const void* data, size_t count, int, int peer, Comm* comm, void* stream) {
  return Add(comm, true, const_cast<char*>(static_cast<const char*>(data)), count, peer, stream);
}

FAKE_EXPORT int ncclRecv(void* data, size_t count, int, int peer, Comm* comm, void* stream) {
  return Add(comm, false, static_cast<char*>(data), count, peer, stream);
}

FAKE_EXPORT const char* ncclGetErrorString(int result) {
  return result == kInvalidUsage ? "invalid usage" : result == kSystemError ? "unhandled system error" : "an error";
}

FAKE_EXPORT const char* ncclGetLastError(Comm*) { return "the fake says so\n"; }
