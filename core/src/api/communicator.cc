// SPDX-License-Identifier: Apache-2.0
// Entry points of sok/communicator.h.
#include "sok/communicator.h"

#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "api/stage_range.h"
#include "common/call.h"
#include "common/status.h"
#include "common/tensor.h"

#ifdef SOK_WITH_CUDA
#include "cuda/runtime.h"
#include "nccl/communicator.h"
#endif

using namespace sok;  // NOLINT: entry points only

namespace {

#ifndef SOK_WITH_CUDA
[[noreturn]] void fail_without_cuda() {
  fail(SOK_UNIMPLEMENTED,
       "NCCL works between GPUs, and this libsok_core was built without CUDA; build it where nvcc is, "
       "with SOK_WITH_CUDA=1");
}
#endif

void check_device(sok_device device) {
  SOK_CHECK(device.type == SOK_CUDA, "device.type is ", device.type, ", must be SOK_CUDA");
}

}  // namespace

#ifdef SOK_WITH_CUDA
struct sok_communicator {
  std::unique_ptr<nccl::Communicator> impl;
};

namespace {

nccl::Communicator& check_communicator(sok_communicator* communicator) {
  SOK_CHECK(communicator != nullptr, "communicator is NULL");
  SOK_CHECK_STATUS(SOK_FAILED_PRECONDITION, !communicator->impl->is_forked(),
                   "this communicator was made before fork() and belongs to the parent process; make a new one");
  return *communicator->impl;
}

int64_t count_elements(const sok_tensor& tensor, const char* what) {
  check_tensor(
      tensor, {what},
      {SOK_INT32, SOK_INT64, SOK_UINT32, SOK_UINT64, SOK_FLOAT16, SOK_FLOAT32, SOK_FLOAT64, SOK_BFLOAT16, SOK_UINT8},
      {kAnySize});
  return tensor.shape[0];
}

void check_counts_of(const int64_t* counts, int32_t num_ranks, int64_t elements, const char* what, const char* tensor) {
  SOK_CHECK(counts != nullptr, what, " is NULL");
  int64_t sum = 0;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    SOK_CHECK(counts[rank] >= 0, what, "[", rank, "] is ", counts[rank], ", must not be negative");
    SOK_CHECK(!__builtin_add_overflow(sum, counts[rank], &sum), "the sum of ", what, " does not fit 64 bits");
  }
  SOK_CHECK(sum == elements, "the sum of ", what, " is ", sum, ", but ", tensor, " has ", elements, " elements");
}

void check_device_of(const sok_context& context, const nccl::Communicator& ranks) {
  SOK_CHECK(context.device.type == SOK_CUDA && context.device.index == ranks.device(), "context.device is ",
            context.device.type == SOK_CUDA ? "CUDA device " : "the CPU, not CUDA device ", context.device.index,
            "; the communicator is of CUDA device ", ranks.device());
}

bool overlap(const void* a, const void* b, size_t a_bytes, size_t b_bytes) {
  const auto first = reinterpret_cast<uintptr_t>(a), second = reinterpret_cast<uintptr_t>(b);
  return a_bytes > 0 && b_bytes > 0 && first < second + b_bytes && second < first + a_bytes;
}

nccl::Reduction reduction_of(int32_t reduction) {
  switch (reduction) {
    case SOK_REDUCE_SUM:
      return nccl::kSum;
    case SOK_REDUCE_MEAN:
      return nccl::kMean;
    case SOK_REDUCE_MIN:
      return nccl::kMin;
    case SOK_REDUCE_MAX:
      return nccl::kMax;
    default:
      fail(SOK_INVALID_ARGUMENT, "reduction is ", reduction, ", must be a sok_reduction");
  }
}

nccl::DataType type_of(int32_t dtype, nccl::Reduction reduction) {
  const bool is_float = dtype == SOK_FLOAT16 || dtype == SOK_BFLOAT16 || dtype == SOK_FLOAT32 || dtype == SOK_FLOAT64;
  SOK_CHECK(is_float || reduction != nccl::kMean, "a mean needs floating point, not ", dtype_name(dtype));
  switch (dtype) {
    case SOK_FLOAT16:
      return nccl::kFloat16;
    case SOK_BFLOAT16:
      return nccl::kBfloat16;
    case SOK_FLOAT32:
      return nccl::kFloat32;
    case SOK_FLOAT64:
      return nccl::kFloat64;
    case SOK_INT32:
      return nccl::kInt32;
    case SOK_INT64:
      return nccl::kInt64;
    case SOK_UINT32:
      return nccl::kUint32;
    case SOK_UINT64:
      return nccl::kUint64;
    default:
      return nccl::kUint8;
  }
}

void check_reduced(int32_t num_arrays, const sok_tensor* send, const sok_tensor* receive) {
  constexpr int32_t kMaxArrays = 1 << 16;
  SOK_CHECK(num_arrays >= 0 && num_arrays <= kMaxArrays, "num_arrays is ", num_arrays, ", must be in [0, ", kMaxArrays,
            "]");
  SOK_CHECK(num_arrays == 0 || (send != nullptr && receive != nullptr), "send or receive is NULL");
  for (int32_t i = 0; i < num_arrays; ++i) {
    const int64_t n = count_elements(send[i], "send"), into = count_elements(receive[i], "receive");
    SOK_CHECK(n == into, "send[", i, "] has ", n, " elements, receive[", i, "] has ", into, "; they must be as many");
    SOK_CHECK(send[i].dtype == send[0].dtype && receive[i].dtype == send[0].dtype, "send[", i, "] is ",
              dtype_name(send[i].dtype), ", receive[", i, "] is ", dtype_name(receive[i].dtype),
              "; all must be as send[0], ", dtype_name(send[0].dtype));
    const size_t bytes = static_cast<size_t>(n) * static_cast<size_t>(dtype_size(send[i].dtype));
    SOK_CHECK(send[i].data == receive[i].data || !overlap(send[i].data, receive[i].data, bytes, bytes), "send[", i,
              "] and receive[", i, "] overlap; they must be the same memory or apart");
  }
}

}  // namespace
#endif

extern "C" int sok_nccl_get_properties(sok_nccl_properties* properties) {
  return SOK_ENTRY({
    SOK_CHECK(properties != nullptr, "properties is NULL");
    SOK_CHECK(properties->struct_size == sizeof(sok_nccl_properties), "properties.struct_size is ",
              properties->struct_size, ", must be ", sizeof(sok_nccl_properties));
#ifdef SOK_WITH_CUDA
    const nccl::Library& library = nccl::library();
    properties->version = library.version;
    properties->reserved = 0;
    std::snprintf(properties->path, sizeof(properties->path), "%s", library.path.c_str());
#else
    fail_without_cuda();
#endif
  });
}

extern "C" int sok_device_get_uuid(sok_device device, char* uuid) {
  return SOK_ENTRY({
    SOK_CHECK(uuid != nullptr, "uuid is NULL");
    check_device(device);
#ifdef SOK_WITH_CUDA
    std::snprintf(uuid, 64, "%s", cuda::device_uuid(device.index).c_str());
#else
    fail_without_cuda();
#endif
  });
}

extern "C" int sok_communicator_id_create(sok_communicator_id* id) {
  return SOK_ENTRY({
    SOK_CHECK(id != nullptr, "id is NULL");
#ifdef SOK_WITH_CUDA
    *id = nccl::make_id();
#else
    fail_without_cuda();
#endif
  });
}

extern "C" int sok_communicator_create(sok_device device, const sok_communicator_id* id, int32_t num_ranks,
                                       int32_t rank, double timeout, sok_communicator** communicator) {
  return SOK_ENTRY({
    SOK_CHECK(id != nullptr, "id is NULL");
    SOK_CHECK(communicator != nullptr, "communicator is NULL");
    check_device(device);
    SOK_CHECK(num_ranks >= 1, "num_ranks is ", num_ranks, ", must be at least 1");
    SOK_CHECK(rank >= 0 && rank < num_ranks, "rank is ", rank, ", must be in [0, ", num_ranks, ")");
    SOK_CHECK(timeout >= 0 && timeout < 1e9, "timeout is ", timeout, ", must be a number of seconds, 0 for 300");
#ifdef SOK_WITH_CUDA
    auto made = std::make_unique<sok_communicator>();
    made->impl = nccl::Communicator::create(device.index, *id, num_ranks, rank, timeout);
    *communicator = made.release();
#else
    fail_without_cuda();
#endif
  });
}

extern "C" int32_t sok_communicator_num_ranks(const sok_communicator* communicator) {
#ifdef SOK_WITH_CUDA
  return communicator != nullptr ? communicator->impl->num_ranks() : 0;
#else
  static_cast<void>(communicator);
  return 0;
#endif
}

extern "C" int sok_all_to_all(const sok_context* context, sok_communicator* communicator, sok_tensor send,
                              const int64_t* send_counts, sok_tensor receive, const int64_t* receive_counts) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
#ifdef SOK_WITH_CUDA
    nccl::Communicator& ranks = check_communicator(communicator);
    check_device_of(checked, ranks);
    const int64_t sent = count_elements(send, "send"), received = count_elements(receive, "receive");
    SOK_CHECK(send.dtype == receive.dtype, "send is ", dtype_name(send.dtype), ", receive is ",
              dtype_name(receive.dtype), "; they must be the same");
    check_counts_of(send_counts, ranks.num_ranks(), sent, "send_counts", "send");
    check_counts_of(receive_counts, ranks.num_ranks(), received, "receive_counts", "receive");
    const auto item = static_cast<size_t>(dtype_size(send.dtype));
    SOK_CHECK(!overlap(send.data, receive.data, static_cast<size_t>(sent) * item, static_cast<size_t>(received) * item),
              "send and receive overlap");
    const StageRange range("exchange");
    ranks.all_to_all(checked, static_cast<const char*>(send.data), send_counts, static_cast<char*>(receive.data),
                     receive_counts, item);
#else
    static_cast<void>(checked);
    SOK_CHECK(communicator != nullptr, "communicator is NULL");
    static_cast<void>(send), static_cast<void>(send_counts), static_cast<void>(receive);
    static_cast<void>(receive_counts);
    fail_without_cuda();
#endif
  });
}

extern "C" int sok_swap_counts(const sok_context* context, sok_communicator* communicator, sok_tensor counts,
                               int64_t* sent, int64_t* received) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
#ifdef SOK_WITH_CUDA
    nccl::Communicator& ranks = check_communicator(communicator);
    check_device_of(checked, ranks);
    check_tensor(counts, {"counts"}, {SOK_INT64}, {ranks.num_ranks(), kAnySize});
    constexpr int64_t kMaxColumns = 1 << 20;
    SOK_CHECK(counts.shape[1] >= 1 && counts.shape[1] <= kMaxColumns, "counts has ", counts.shape[1],
              " columns, must have between 1 and ", kMaxColumns);
    SOK_CHECK(sent != nullptr, "sent is NULL");
    SOK_CHECK(received != nullptr, "received is NULL");
    const StageRange range("swap_counts");
    ranks.swap_counts(checked, counts, sent, received);
#else
    static_cast<void>(checked), static_cast<void>(counts), static_cast<void>(sent), static_cast<void>(received);
    SOK_CHECK(communicator != nullptr, "communicator is NULL");
    fail_without_cuda();
#endif
  });
}

extern "C" int sok_share_errors(const sok_context* context, sok_communicator* communicator, int32_t failed) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
#ifdef SOK_WITH_CUDA
    nccl::Communicator& ranks = check_communicator(communicator);
    check_device_of(checked, ranks);
    SOK_CHECK(has_error_record(checked), "context.errors is NULL");
    const StageRange range("share_errors");
    ranks.share_errors(checked, failed != 0);
#else
    static_cast<void>(checked), static_cast<void>(failed);
    SOK_CHECK(communicator != nullptr, "communicator is NULL");
    fail_without_cuda();
#endif
  });
}

extern "C" int sok_communicator_prepare_all_reduce(sok_communicator* communicator) {
  return SOK_ENTRY({
#ifdef SOK_WITH_CUDA
    check_communicator(communicator).prepare_all_reduce();
#else
    SOK_CHECK(communicator != nullptr, "communicator is NULL");
    fail_without_cuda();
#endif
  });
}

extern "C" int sok_all_reduce(const sok_context* context, sok_communicator* communicator, int32_t reduction,
                              int32_t num_arrays, const sok_tensor* send, const sok_tensor* receive) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
#ifdef SOK_WITH_CUDA
    nccl::Communicator& ranks = check_communicator(communicator);
    check_device_of(checked, ranks);
    const nccl::Reduction how = reduction_of(reduction);
    check_reduced(num_arrays, send, receive);
    if (num_arrays == 0) return;
    const StageRange range("all_reduce");
    ranks.all_reduce(checked, how, type_of(send[0].dtype, how), num_arrays, send, receive);
#else
    static_cast<void>(checked), static_cast<void>(reduction), static_cast<void>(num_arrays);
    static_cast<void>(send), static_cast<void>(receive);
    SOK_CHECK(communicator != nullptr, "communicator is NULL");
    fail_without_cuda();
#endif
  });
}

extern "C" int sok_communicator_check(sok_communicator* communicator) {
  return SOK_ENTRY({
#ifdef SOK_WITH_CUDA
    check_communicator(communicator).check();
#else
    SOK_CHECK(communicator != nullptr, "communicator is NULL");
    fail_without_cuda();
#endif
  });
}

extern "C" int sok_communicator_abort(sok_communicator* communicator) {
  return SOK_ENTRY({
#ifdef SOK_WITH_CUDA
    check_communicator(communicator).give_up("this rank aborted it");
#else
    SOK_CHECK(communicator != nullptr, "communicator is NULL");
    fail_without_cuda();
#endif
  });
}

extern "C" int sok_communicator_destroy(sok_communicator* communicator) {
  return SOK_ENTRY({
    if (communicator == nullptr) return;
#ifdef SOK_WITH_CUDA
    if (communicator->impl->is_forked()) return;
    SOK_CHECK_STATUS(SOK_UNAVAILABLE, communicator->impl->finish(),
                     "NCCL does not come back from ending an exchange; what the communicator holds stays in use");
    delete communicator;
#else
    fail_without_cuda();
#endif
  });
}
