// SPDX-License-Identifier: Apache-2.0
#include "cuda/upload.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/report.cuh"

namespace sok::cuda {
namespace {

template <int kPieces>
struct Parcel {
  uint4 pieces[kPieces];
  uint4* to;
  int32_t count;
  int32_t* gate;
  const sok_error_record* errors;
};

template <int kPieces>
__global__ void __launch_bounds__(kThreads) upload_kernel(const __grid_constant__ Parcel<kPieces> parcel) {
  for (int i = threadIdx.x; i < parcel.count; i += kThreads) parcel.to[i] = parcel.pieces[i];
  if (threadIdx.x == 0 && parcel.gate != nullptr) *parcel.gate = is_recorded(parcel.errors) ? 1 : 0;
}

template <int kPieces>
void send_parcel(const Scope& scope, const char* from, size_t size, char* to, int32_t* gate,
                 const sok_error_record* errors) {
  Parcel<kPieces> parcel;
  std::memcpy(parcel.pieces, from, size);
  parcel.to = reinterpret_cast<uint4*>(to);
  parcel.count = static_cast<int32_t>(size / sizeof(uint4));
  parcel.gate = gate;
  parcel.errors = errors;
  SOK_LAUNCH(upload_kernel<kPieces>, 1, scope.stream(), parcel);
}

}  // namespace

void Upload::send(const Scope& scope, int32_t* gate, const sok_error_record* errors) {
  constexpr int kSmall = 224,
                kLarge = 1000;  // 16-byte pieces: below 4 KB and 16 KB of parameters
  memory_ = Buffer<char>(scope.context(), static_cast<int64_t>(bytes_.size()));
  size_t done = 0;
  do {
    const size_t left = bytes_.size() - done;
    const char* from = bytes_.data() + done;
    char* to = memory_.data() + done;
    if (left <= kSmall * sizeof(uint4)) {
      send_parcel<kSmall>(scope, from, left, to, gate, errors);
      return;
    }
    const size_t size = std::min(left, kLarge * sizeof(uint4));
    send_parcel<kLarge>(scope, from, size, to, gate, errors);
    done += size;
    gate = nullptr;
  } while (done < bytes_.size());
}

}  // namespace sok::cuda
