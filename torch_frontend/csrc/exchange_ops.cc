// SPDX-License-Identifier: Apache-2.0
// The exchange of CUDA tensors over the core's NCCL communicator.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "context.h"
#include "ops.h"
#include "sok/communicator.h"
#include "status.h"

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
  check(sok_all_to_all(context.get(), ranks, from, send_counts.data(), to, receive_counts.data()));
  received.unsafeGetTensorImpl()->bump_version();
}

void check_communicator(int64_t communicator) { check(sok_communicator_check(pointer(communicator))); }

}  // namespace sok_torch
