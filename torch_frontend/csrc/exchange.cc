// SPDX-License-Identifier: Apache-2.0
#include "exchange.h"

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <numeric>

#include "ops.h"

namespace sok_torch {
namespace {

std::mutex mutex;
std::map<int64_t, c10::weak_intrusive_ptr<Exchange>> exchanges;

}  // namespace

c10::intrusive_ptr<Exchange> Exchange::make(int64_t number, int64_t num_ranks, int64_t rank) {
  auto result = c10::make_intrusive<Exchange>(number, num_ranks, rank);
  const std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(exchanges, [](const auto& each) { return each.second.expired(); });
  exchanges.insert_or_assign(number, c10::weak_intrusive_ptr<Exchange>(result));
  return result;
}

c10::intrusive_ptr<Exchange> Exchange::find(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = exchanges.find(number);
  auto result = found == exchanges.end() ? c10::intrusive_ptr<Exchange>() : found->second.lock();
  TORCH_CHECK(result.defined(), "there is no exchange of the number ", number, " any more");
  return result;
}

at::Tensor Exchange::all_to_all(const at::Tensor& tensor, const std::vector<int64_t>& send,
                                const std::vector<int64_t>& receive) const {
  const int64_t communicator = communicator_of(tensor.device());
  if (communicator != 0) {
    at::Tensor received = at::empty({std::accumulate(receive.begin(), receive.end(), int64_t{0})}, tensor.options());
    sok_torch::all_to_all(received, tensor, communicator, send, receive);
    return received;
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("sok::exchange", "")
                             .typed<at::Tensor(int64_t, const at::Tensor&, at::IntArrayRef, at::IntArrayRef)>();
  return op.call(number_, tensor, send, receive);
}

std::pair<at::Tensor, at::Tensor> Exchange::swap_counts(at::Device device, const CountMessage& message) {
  const auto& [known, counts, columns] = message;
  const int64_t communicator = communicator_of(device);
  if (communicator != 0) {
    if (has_failure()) known.select(1, -1).fill_(1);
    const at::Tensor swapped = sok_torch::swap_counts(known, counts, columns, communicator, device);
    const at::Tensor sent = swapped.select(0, 0), received = swapped.select(0, 1);
    if (!failed_ranks(received).empty()) {
      static const auto op = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("sok::check_swapped", "")
                                 .typed<void(at::Device, const at::Tensor&, const at::Tensor&, const at::Tensor&)>();
      op.call(device, known, sent, received);
    }
    throw_failure();
    const int64_t num_counts = swapped.size(2) - 1;
    return {sent.narrow(1, 0, num_counts), received.narrow(1, 0, num_counts)};
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("sok::exchange_counts", "")
                             .typed<std::tuple<at::Tensor, at::Tensor>(int64_t, at::Device, const at::Tensor&,
                                                                       at::TensorList, at::IntArrayRef)>();
  auto [sent, received] = op.call(number_, device, known, counts, columns);
  return {std::move(sent), std::move(received)};
}

void Exchange::keep_failure(std::exception_ptr failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_) failure_ = std::move(failure);
}

bool Exchange::has_failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_ != nullptr;
}

void Exchange::throw_failure() {
  std::exception_ptr failure;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_.swap(failure);
  }
  if (failure) std::rethrow_exception(failure);
}

bool Exchange::share_errors(at::Device device, bool failed) const {
  const int64_t communicator = communicator_of(device);
  if (communicator != 0) sok_torch::share_errors(communicator, device, failed);
  return communicator != 0;
}

void Exchange::tell_of_failure(at::Device device, int64_t num_counts) {
  at::Tensor known = at::zeros({num_ranks_, num_counts + 1}, at::TensorOptions().dtype(at::kLong).device(at::kCPU));
  known.select(1, num_counts).fill_(1);
  swap_counts(device, {known, {}, {}});
}

}  // namespace sok_torch
