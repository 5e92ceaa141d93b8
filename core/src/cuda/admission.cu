// SPDX-License-Identifier: Apache-2.0
// Admission on the device (table/admission.h). How many keys a table lacks the host does not know: its candidates are
// given all keys of the call, and pass over those that they are not asked for.
#include "table/admission.h"

#include "common/memory.h"
#include "cuda/launch.h"
#include "cuda/number.h"
#include "cuda/vector.cuh"
#include "table/dynamic_table.h"

namespace sok::cuda {
namespace {

// Whether a key of a request concerns the candidates.
struct IsLacking {
  const int64_t* slots;
  __device__ bool operator()(int64_t i) const { return slots[i] < 0; }
};
struct IsAdmitted {
  const uint8_t *is_new, *allowed;
  __device__ bool operator()(int64_t i) const { return is_new[i] == 1 && allowed[i] != 0; }
};

template <typename IsAsked>
__global__ void __launch_bounds__(kThreads)
    list_kernel(const void* from, bool is_64bit, int64_t n, const __grid_constant__ IsAsked is_asked, int64_t* keys,
                uint8_t* asked) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  keys[i] = load_integer(from, is_64bit, i);
  asked[i] = is_asked(i) ? 1 : 0;
}

struct IsMarked {
  const uint8_t* marks;
  int64_t n;
  __device__ uint32_t operator()(uint32_t i) const { return i < n && marks[i] != 0 ? 1u : 0u; }
};

__global__ void __launch_bounds__(kThreads)
    limit_kernel(const uint32_t* ranks, int64_t n, int64_t most, uint8_t* marks) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n && ranks[i] >= most) marks[i] = 0;
}

// counted: the slots of candidates and -1; nullptr: no key has to wait.
__global__ void __launch_bounds__(kThreads)
    allow_kernel(const void* keys, bool is_64bit, int64_t n, const int64_t* slots, const int64_t* counted,
                 const int64_t* scores, const __grid_constant__ AdmissionRule rule, uint8_t* allowed) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  bool is_allowed = true;
  if (slots[i] < 0) {
    if (counted != nullptr) is_allowed = counted[i] >= 0 && Uses::rank_of(scores[counted[i]]) >= rule.threshold;
    is_allowed = is_allowed && rule.passes_filter(load_integer(keys, is_64bit, i));
  }
  allowed[i] = is_allowed ? 1 : 0;
}

// The keys of requests, one after the other, and which of them the candidates are asked for.
struct List {
  Buffer<int64_t> keys, slots;
  Buffer<uint8_t> asked;

  template <typename AskedOf>
  List(const Scope& scope, const std::vector<HashRequest>& requests, const AskedOf& asked_of) {
    int64_t n = 0;
    for (const HashRequest& request : requests) n += request.keys.size;
    keys = Buffer<int64_t>(scope.context(), n);
    slots = Buffer<int64_t>(scope.context(), n);
    asked = Buffer<uint8_t>(scope.context(), n);
    int64_t first = 0;
    for (const HashRequest& request : requests) {
      SOK_LAUNCH(list_kernel, ceil_div(request.keys.size, kThreads), scope.stream(), request.keys.data,
                 request.keys.is_64bit, request.keys.size, asked_of(request), keys.data() + first,
                 asked.data() + first);
      first += request.keys.size;
    }
  }

  Integers view() const { return {keys.data(), keys.size(), true}; }
};

}  // namespace

void allow_keys(const sok_context& context, const std::vector<HashRequest>& requests, const AdmissionRule& rule,
                DynamicTable* candidates) {
  const Scope scope(context);
  const auto allow = [&](const int64_t* counted, const int64_t* scores) {
    for (const HashRequest& request : requests) {
      SOK_LAUNCH(allow_kernel, ceil_div(request.keys.size, kThreads), scope.stream(), request.keys.data,
                 request.keys.is_64bit, request.keys.size, request.slots, counted, scores, rule, request.allowed);
      if (counted != nullptr) counted += request.keys.size;
    }
  };
  if (candidates == nullptr) return allow(nullptr, nullptr);
  const List list(scope, requests, [](const HashRequest& request) { return IsLacking{request.slots}; });
  const int64_t n = list.keys.size(), most = candidates->index().capacity();
  if (n == 0) return;
  if (n > most) {  // a call counts for as many as there may be
    const Buffer<uint32_t> ranks(scope.context(), n + 1);
    number(scope, IsMarked{list.asked.data(), n}, n, ranks.data());
    SOK_LAUNCH(limit_kernel, ceil_div(n, kThreads), scope.stream(), ranks.data(), n, most, list.asked.data());
  }
  candidates->find_or_insert(scope.context(), list.view(), list.slots.data(), list.asked.data());
  allow(list.slots.data(), candidates->eviction()->scores());
}

void forget_candidates(const sok_context& context, const std::vector<HashRequest>& requests, DynamicTable& candidates) {
  const Scope scope(context);
  const List list(scope, requests,
                  [](const HashRequest& request) { return IsAdmitted{request.is_new, request.allowed}; });
  if (list.keys.size() > 0) candidates.erase(scope.context(), list.view(), list.slots.data(), list.asked.data());
}

}  // namespace sok::cuda
