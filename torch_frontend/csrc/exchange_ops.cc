// SPDX-License-Identifier: Apache-2.0
// The exchange of CUDA tensors over the core's NCCL communicator.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <vector>

#include "context.h"
#include "ops.h"
#include "sok/communicator.h"
#include "status.h"
#include "views.h"

namespace sok_torch {
namespace {

sok_communicator* pointer(int64_t communicator) { return reinterpret_cast<sok_communicator*>(communicator); }

// Elements travel as they are, so any dtype of the same size stands for the tensor's.
sok_tensor flat_view(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.is_contiguous(), what, " must be 1-D and contiguous");
  sok_tensor result = SOK_NO_TENSOR;
  result.data = tensor.data_ptr();
  result.rank = 1;
  result.shape[0] = tensor.numel();
  switch (tensor.element_size()) {
    case 1:
      result.dtype = SOK_UINT8;
      break;
    case 2:
      result.dtype = SOK_FLOAT16;
      break;
    case 4:
      result.dtype = SOK_INT32;
      break;
    case 8:
      result.dtype = SOK_INT64;
      break;
    default:
      TORCH_CHECK_VALUE(false, what, " has dtype ", tensor.scalar_type(), ", which is not supported");
  }
  return result;
}

}  // namespace

at::Tensor swap_counts(const at::Tensor& counts, int64_t communicator) {
  sok_communicator* ranks = pointer(communicator);
  TORCH_CHECK_VALUE(ranks != nullptr && counts.is_cuda(), "counts are swapped over a communicator of a CUDA device");
  TORCH_CHECK_VALUE(counts.dim() == 2 && counts.size(0) == sok_communicator_num_ranks(ranks) && counts.size(1) > 0 &&
                        counts.scalar_type() == at::kLong,
                    "counts must be [", sok_communicator_num_ranks(ranks), ", k] int64");
  at::Tensor swapped = at::empty({2, counts.size(0), counts.size(1)}, counts.options().device(at::kCPU));
  int64_t* const sent = swapped.mutable_data_ptr<int64_t>();
  const Context context(counts.device());
  SOK_CALL(sok_swap_counts(context.get(), ranks, view(counts, "counts"), sent, sent + counts.numel()));
  return swapped;
}

void share_errors(int64_t communicator, at::Device device, bool failed) {
  const Context context(device);
  SOK_CALL(sok_share_errors(context.get(), pointer(communicator), failed ? 1 : 0));
}

std::vector<int64_t> failed_ranks(const at::Tensor& received) {
  TORCH_CHECK_VALUE(received.dim() == 2 && received.size(1) > 0 && received.is_contiguous() && received.is_cpu() &&
                        received.scalar_type() == at::kLong,
                    "received must be [num_ranks, columns] int64 on the CPU");
  std::vector<int64_t> result;
  const int64_t *data = received.const_data_ptr<int64_t>(), columns = received.size(1);
  for (int64_t rank = 0; rank < received.size(0); ++rank) {
    if (data[(rank + 1) * columns - 1] != 0) result.push_back(rank);
  }
  return result;
}

void all_to_all(at::Tensor received, const at::Tensor& send, int64_t communicator, at::IntArrayRef send_counts,
                at::IntArrayRef receive_counts) {
  sok_communicator* ranks = pointer(communicator);
  const size_t num_ranks = ranks != nullptr ? static_cast<size_t>(sok_communicator_num_ranks(ranks)) : 1;
  TORCH_CHECK_VALUE(send_counts.size() == num_ranks && receive_counts.size() == num_ranks, "got ", send_counts.size(),
                    " send_counts and ", receive_counts.size(), " receive_counts for ", num_ranks, " ranks");
  TORCH_CHECK_VALUE(send.scalar_type() == received.scalar_type() && send.device() == received.device(),
                    "send and received must have one dtype and device");
  const sok_tensor from = flat_view(send, "send"), to = flat_view(received, "received");
  if (ranks == nullptr) {
    TORCH_CHECK_VALUE(
        send_counts[0] == send.numel() && receive_counts[0] == received.numel() && send.numel() == received.numel(),
        "one rank sends itself all of `send`: its counts are wrong, or a communicator is missing");
    received.copy_(send);
    return;
  }
  TORCH_CHECK_VALUE(send.is_cuda(), "only CUDA tensors travel over a communicator, not one on ", send.device());
  const Context context(send.device());
  SOK_CALL(sok_all_to_all(context.get(), ranks, from, send_counts.data(), to, receive_counts.data()));
  received.unsafeGetTensorImpl()->bump_version();
}

}  // namespace sok_torch
