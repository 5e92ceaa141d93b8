// SPDX-License-Identifier: Apache-2.0
// The few functions of NCCL that are used, found at run time. Declared here as in nccl.h of 2.17 and newer, whose ABI
// later versions keep, so that building needs no header of NCCL.
#ifndef SOK_NCCL_LIBRARY_H_
#define SOK_NCCL_LIBRARY_H_

#include <climits>
#include <cstddef>
#include <string>

namespace sok::nccl {

constexpr int kMinVersion = 21700;

struct OpaqueComm;
using Comm = OpaqueComm*;
using Stream = void*;  // cudaStream_t

enum Result : int { kSuccess = 0, kInProgress = 7 };  // the others are errors
enum DataType : int {
  kInt8 = 0,  // what is not added up travels as bytes
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9
};
enum Reduction : int { kSum = 0, kMax = 2, kMin = 3, kMean = 4 };

struct UniqueId {
  char bytes[128];
};

// ncclConfig_t as of 2.17. Newer libraries look at `version` and take their defaults for the fields that came later.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kMinVersion;
  int blocking = INT_MIN;  // INT_MIN, NULL: the library's default
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
};

struct Library {
  int version = 0;
  std::string path;

  Result (*get_version)(int*) = nullptr;
  Result (*get_unique_id)(UniqueId*) = nullptr;
  Result (*comm_init_rank_config)(Comm*, int, UniqueId, int, Config*) = nullptr;
  Result (*comm_destroy)(Comm) = nullptr;
  Result (*comm_abort)(Comm) = nullptr;
  Result (*comm_get_async_error)(Comm, Result*) = nullptr;
  Result (*group_start)() = nullptr;
  Result (*group_end)() = nullptr;
  Result (*send)(const void*, size_t, DataType, int, Comm, Stream) = nullptr;
  Result (*recv)(void*, size_t, DataType, int, Comm, Stream) = nullptr;
  Result (*all_reduce)(const void*, void*, size_t, DataType, Reduction, Comm, Stream) = nullptr;
  const char* (*get_error_string)(Result) = nullptr;
  const char* (*get_last_error)(Comm) = nullptr;

  // "unhandled system error (2): connection reset by peer"; the last part where NCCL has one.
  std::string describe(Result result) const;
};

// Opened at the first call that succeeds and kept until the process ends. Throws Error(SOK_UNAVAILABLE).
const Library& library();

// 22803 -> "2.28.3"
std::string version_text(int version);

}  // namespace sok::nccl

#endif  // SOK_NCCL_LIBRARY_H_
