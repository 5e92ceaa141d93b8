// SPDX-License-Identifier: Apache-2.0
// How what the ranks of a call send each other travels between its stages (../exchange.py).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

namespace sok_torch {

// torch.classes.sok.Exchange. Tensors of a CUDA device that has a communicator travel straight from here, without
// Python; all others through Python's Exchange of this number, to which the ops `exchange`, ... lead.
class Exchange final : public torch::CustomClassHolder {
 public:
  Exchange(int64_t number, int64_t num_ranks, int64_t rank) : number_(number), num_ranks_(num_ranks), rank_(rank) {}

  // Makes one that `find` knows by its number while it lives. For an object like this one among the arguments of a call
  // from Python PyTorch throws and catches two exceptions, which takes it 20 us; so those calls give the number.
  static c10::intrusive_ptr<Exchange> make(int64_t number, int64_t num_ranks, int64_t rank);
  // Throws RuntimeError when it is gone.
  static c10::intrusive_ptr<Exchange> find(int64_t number);

  // communicator: the address of a sok_communicator of this CUDA device, borrowed until the next call; 0: there is
  // none any more.
  void connect(int64_t communicator, int64_t device) {
    device_ = device;
    communicator_ = communicator;
  }

  int64_t num_ranks() const { return num_ranks_; }
  int64_t rank() const { return rank_; }

  // Sends send[r] consecutive elements of a 1-D tensor to each rank r and returns what came, by source rank; receive[r]
  // come from rank r. On a GPU it is enqueued on the current stream.
  at::Tensor all_to_all(const at::Tensor& tensor, const std::vector<int64_t>& send,
                        const std::vector<int64_t>& receive) const;

  // Tells every rank how much comes to it; waits. counts: [num_ranks, k] int64 where the tables of the call are; the
  // last column is not 0 where this rank has failed. -> (sent, received), both on the CPU like counts, which mean
  // nothing where this rank has failed. Throws PeerError where another rank has failed, and what the device has found
  // wrong on this one, or what was kept.
  std::pair<at::Tensor, at::Tensor> swap_counts(const at::Tensor& counts);

  // Takes part in `swap_counts` of k counts as a rank that has failed: the others throw PeerError there. Throws what
  // was kept.
  void tell_of_failure(at::Device device, int64_t k);

  // Tells every rank whether this one can do its part of an optimizer's step, before a row changes. Throws as
  // swap_counts. Where the device has a communicator nothing waits unless it is asked to: sok_apply changes nothing on
  // any rank then, and the next lookup throws it. Ranks need not agree on `wait`, nor, where there is a communicator,
  // on the device: one of them may have tables on the CPU alone.
  void agree(at::Device device, bool failed, bool wait);

  // What went wrong in backward(), where the other ranks do not wait for the news: it is thrown here, and told to them,
  // by the next `agree` or swap_counts.
  void keep_failure(std::exception_ptr failure);

 private:
  std::exception_ptr take_failure();

  int64_t communicator_of(at::Device device) const {
    return device.is_cuda() && device.index() == device_ ? communicator_.load() : 0;
  }

  std::pair<at::Tensor, at::Tensor> swap(const at::Tensor& counts, bool failed) const;

  const int64_t number_, num_ranks_, rank_;
  std::atomic<int64_t> communicator_{0}, device_{-1};
  std::mutex mutex_;
  std::exception_ptr failure_;
};

}  // namespace sok_torch
