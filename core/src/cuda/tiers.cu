// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiers.h"

#include <utility>

#include "common/memory.h"
#include "cuda/context.h"
#include "cuda/launch.h"
#include "cuda/runtime.h"

namespace sok::cuda {
namespace {

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

void wait_for_event(void* stream, void* event) {
  SOK_CUDA_CHECK(cudaStreamWaitEvent(as_stream(stream), static_cast<cudaEvent_t>(event)));
}

}  // namespace

Tiers::Tiers(int64_t device_rows, std::unique_ptr<ReservedRange> bits)
    : sok::Tiers(device_rows, std::move(bits)),
      counts_(static_cast<TierCounts*>(allocate_page_locked(sizeof(TierCounts))), release_page_locked),
      stream_(create_stream(), destroy_stream),
      before_(create_event(), destroy_event),
      done_(create_event(), destroy_event) {
  *counts_ = {};
}

Tiers::~Tiers() {
  cudaStreamSynchronize(as_stream(stream_.get()));  // an error here is one of the work before
}

void Tiers::add_counts(sok_dynamic_table_counts& counts) const {
  const volatile TierCounts& seen = *counts_;
  counts.device_hits += seen.device_hits;
  counts.host_hits += seen.host_hits;
  counts.moves += seen.moves;
}

void Tiers::join(const sok_context& context) {
  if (is_done(done_.get()) || context.stream == stream_.get()) return;
  SOK_CHECK_STATUS(SOK_FAILED_PRECONDITION, !is_capturing(context.stream),
                   "a table is used in what a CUDA graph captures while its rows are being prefetched");
  wait_for_event(context.stream, done_.get());
}

void Tiers::wait_for(void* stream) {
  record_event(before_.get(), stream);
  wait_for_event(stream_.get(), before_.get());
}

void Tiers::set_pending(void* stream) { record_event(done_.get(), stream); }

uint32_t* Tiers::bits(void* stream, int64_t step) {
  const int64_t backed = bits_->backed_bytes(), begin = step == step_ ? cleared_ : 0;
  if (begin < backed) {
    SOK_CUDA_CHECK(cudaMemsetAsync(bits_->data() + begin, 0, static_cast<size_t>(backed - begin), as_stream(stream)));
  }
  step_ = step;
  cleared_ = backed;
  return reinterpret_cast<uint32_t*>(bits_->data());
}

std::unique_ptr<sok::Tiers> make_tiers(int64_t device_rows, std::unique_ptr<ReservedRange> bits) {
  return std::make_unique<Tiers>(device_rows, std::move(bits));
}

void ahead(const sok_context& context, const std::vector<sok::Tiers*>& tiers, const std::vector<Integers>& keys,
           const std::function<void(const sok_context&, const std::vector<Integers>&)>& body) {
  const Scope scope(context);
  SOK_CHECK_STATUS(SOK_FAILED_PRECONDITION, !is_capturing(scope.stream()),
                   "rows cannot be prefetched while the stream is being captured in a CUDA graph");
  Tiers& first = static_cast<Tiers&>(*tiers[0]);
  sok_context own = scope.context();
  own.stream = first.stream();
  own.allocator = {nullptr, nullptr, nullptr};
  own.errors = nullptr;
  const Scope beside(own);
  // The caller may enqueue what overwrites its keys as soon as the call is over: they are copied before that.
  int64_t bytes = 0;
  for (const Integers& each : keys) bytes += round_up(each.size * (each.is_64bit ? 8 : 4), 16);
  const Buffer<char> copies(beside.context(), bytes);
  first.set_pending(beside.stream());
  first.join(scope.context());
  std::vector<Integers> copied = keys;
  int64_t begin = 0;
  for (Integers& each : copied) {
    const int64_t size = each.size * (each.is_64bit ? 8 : 4);
    copy(copies.data() + begin, each.data, static_cast<size_t>(size), scope.stream());
    each.data = copies.data() + begin;
    begin += round_up(size, 16);
  }
  first.wait_for(scope.stream());
  for (sok::Tiers* each : tiers) each->join(beside.context());
  body(beside.context(), copied);
  for (sok::Tiers* each : tiers) static_cast<Tiers*>(each)->set_pending(beside.stream());
}

}  // namespace sok::cuda
