// SPDX-License-Identifier: Apache-2.0
#include "exchange.h"

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <numeric>
#include <tuple>

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

std::pair<at::Tensor, at::Tensor> Exchange::swap_counts(const at::Tensor& counts) {
  const std::exception_ptr failure = take_failure();
  if (!failure) return swap(counts, false);
  swap(at::ones_like(counts), true);
  std::rethrow_exception(failure);
}

std::pair<at::Tensor, at::Tensor> Exchange::swap(const at::Tensor& counts, bool failed) const {
  const int64_t communicator = communicator_of(counts.device());
  if (communicator != 0) {
    const at::Tensor swapped = sok_torch::swap_counts(counts, communicator);
    const at::Tensor sent = swapped.select(0, 0), received = swapped.select(0, 1);
    if (!failed && !failed_ranks(received).empty()) {
      static const auto op = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("sok::check_swapped", "")
                                 .typed<void(at::Device, const at::Tensor&, const at::Tensor&)>();
      op.call(counts.device(), sent, received);
    }
    return {sent, received};
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("sok::exchange_counts", "")
                             .typed<std::tuple<at::Tensor, at::Tensor>(int64_t, const at::Tensor&, bool)>();
  auto [sent, received] = op.call(number_, counts, failed);
  return {std::move(sent), std::move(received)};
}

void Exchange::tell_of_failure(at::Device device, int64_t k) {
  const std::exception_ptr failure = take_failure();
  swap(at::ones({num_ranks_, k}, at::TensorOptions(at::kLong).device(device)), true);
  if (failure) std::rethrow_exception(failure);
}

void Exchange::agree(at::Device device, bool failed, bool wait) {
  if (const int64_t index = device_; communicator_ != 0 && !(device.is_cuda() && device.index() == index)) {
    device = at::Device(at::kCUDA, static_cast<at::DeviceIndex>(index));  // where the other ranks' tables may be
    wait = true;
  }
  const int64_t communicator = communicator_of(device);
  if (communicator == 0 || wait) {
    if (failed) return tell_of_failure(device, 1);
    swap_counts(at::zeros({num_ranks_, 1}, at::TensorOptions(at::kLong).device(device)));
    return;
  }
  const std::exception_ptr failure = take_failure();
  sok_torch::share_errors(communicator, device, failed || failure);  // for the others the same as a swap of no counts
  if (failure) std::rethrow_exception(failure);
}

void Exchange::keep_failure(std::exception_ptr failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_) failure_ = std::move(failure);
}

std::exception_ptr Exchange::take_failure() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(failure_, nullptr);
}

}  // namespace sok_torch
