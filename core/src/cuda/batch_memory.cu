// SPDX-License-Identifier: Apache-2.0
#include "cuda/batch_memory.h"

#include <algorithm>

#include "common/status.h"
#include "cuda/runtime.h"

namespace sok::cuda {
namespace {

constexpr int kMostPending = 4;  // pieces that a batch would fit into

}  // namespace

BatchMemory::Piece::~Piece() {
  if (copied != nullptr) destroy_event(copied);
  if (used != nullptr) destroy_event(used);
  if (data != nullptr) cuda::release(data);
}

BatchMemory::BatchMemory(int32_t device) : device_(device), stream_(create_stream()) {}

BatchMemory::~BatchMemory() {
  for (const auto& piece : pieces_) wait_for_event(piece->used);
  pieces_.clear();
  destroy_stream(stream_);
}

void* BatchMemory::fill(const void* host, size_t bytes) {
  Piece* piece = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    piece = &take(bytes);
    piece->given_out = true;
    copy(piece->data, host, bytes, stream_);
    record_event(piece->copied, stream_);
  }
  wait_for_event(piece->copied);
  return piece->data;
}

// A free piece that is at most twice as large as need be; the copies of the stream come after what uses it.
BatchMemory::Piece& BatchMemory::take(size_t bytes) {
  Piece* oldest = nullptr;
  int pending = 0;
  for (const auto& piece : pieces_) {
    if (piece->given_out || piece->bytes < bytes || piece->bytes / 2 > bytes) continue;
    if (is_done(piece->used)) return *piece;
    if (oldest == nullptr) oldest = piece.get();
    ++pending;
  }
  if (pending >= kMostPending) {
    make_wait(stream_, oldest->used);
    return *oldest;
  }
  auto made = std::make_unique<Piece>();
  made->data = allocate(bytes);
  made->bytes = bytes;
  made->copied = create_event();
  made->used = create_event();
  pieces_.push_back(std::move(made));
  return *pieces_.back();
}

void BatchMemory::release(void* data, void* stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(pieces_.begin(), pieces_.end(), [data](const std::unique_ptr<Piece>& piece) {
    return piece->given_out && piece->data == data;
  });
  SOK_CHECK(found != pieces_.end(), "data is no piece of this memory that is given out");
  record_event((*found)->used, stream);
  (*found)->given_out = false;
  pieces_.splice(pieces_.end(), pieces_, found);
}

}  // namespace sok::cuda
