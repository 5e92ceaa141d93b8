// SPDX-License-Identifier: Apache-2.0
// The hash index on the device. A call finds its keys, all tables at once; of those to be inserted or erased it numbers
// the first occurrences in the order of the call, which gives their slots, and touches an index only where all fit.
#include "table/hash_index.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "common/memory.h"
#include "cuda/hash_kernels.cuh"
#include "cuda/hash_upkeep.cuh"
#include "cuda/number.h"
#include "cuda/runtime.h"
#include "cuda/upload.h"

namespace sok::cuda {
namespace {

constexpr int64_t kItemBytes = sizeof(int64_t);
constexpr int64_t kSlotsOfExport = int64_t{1} << 28;  // together: 12 bytes for each

int locate(const sok_context* context, int32_t num_requests, const sok_index_request* requests, uint32_t flags);

class Index final : public sok_hash_index {
 public:
  Index(const sok_hash_index_config& config, int64_t max_guests) : sok_hash_index(config, max_guests, locate) {
    buckets_ = reserve_range(range_config(segments_.most() * kSegmentBytes));
    keys_ = reserve_range(range_config(most_slots() * kItemBytes));
    free_ = reserve_range(range_config(most_slots() * kItemBytes));
    if (max_guests > 0) guests_ = reserve_range(range_config(most_slots() * kItemBytes));
    buckets_->grow(segments_.count() * kSegmentBytes);
    keys_->grow(config.initial_rows * kItemBytes);
    try {
      state_ = static_cast<State*>(allocate(sizeof(State)));
      news_ = static_cast<News*>(allocate_page_locked(sizeof(News)));
      *news_ = {};
      SOK_CUDA_CHECK(cudaMemset(state_, 0, sizeof(State)));
      SOK_CUDA_CHECK(cudaMemset(buckets_->data(), 0, static_cast<size_t>(segments_.count() * kSegmentBytes)));
      SOK_CUDA_CHECK(cudaDeviceSynchronize());  // whichever stream uses it first
    } catch (...) {
      free_memory();
      throw;
    }
  }
  ~Index() override { free_memory(); }

  void reserve(const sok_context& context, int64_t rows) override {
    const Scope scope(context);
    const Report report(scope);
    make_room(scope, report, rows, rows);
    report.finish(id(context, 0));
  }

  void clear(const sok_context& context) override {
    const Scope scope(context);
    SOK_CUDA_CHECK(
        cudaMemsetAsync(buckets_->data(), 0, static_cast<size_t>(segments_.in_use() * kSegmentBytes), scope.stream()));
    SOK_CUDA_CHECK(cudaMemsetAsync(state_, 0, offsetof(State, num_insertions), scope.stream()));
    most_guests_ = 0;
    // What the host hears of calls before this one is over. Calls of a graph are replayed under an old number.
    if (!was_captured_) cleared_ = ++inserted_;
    count_slots();
  }

  int64_t size(const sok_context& context) const override {
    const Scope scope(context);
    return exact(scope).size();
  }

  int64_t num_slots() const override { return num_slots_; }
  const int64_t* next_slot() const override { return &state_->next_slot; }

  void hear(const sok_context& context, int64_t slots) const override {
    const Scope scope(context);
    if (is_capturing(scope.stream())) return;
    for (count_slots(); num_slots_ > slots && news().inserted != inserted_ && !is_idle(scope.stream()); count_slots()) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    count_slots();
  }

  int64_t num_insertions() const override { return news().state.num_insertions; }
  int64_t num_evictions() const override { return news().state.num_evictions; }
  int64_t num_expirations() const override { return news().state.num_expirations; }
  int64_t num_guests_ever() const override { return news().state.num_guests_ever; }

  bool release_guests(const sok_context& context, int64_t most, int32_t* since) override {
    if (most_guests_ <= most) return false;
    const Scope scope(context);
    make_room_for_free(most_guests_);
    SOK_LAUNCH(release_kernel, ceil_div(most_guests_, kThreads), scope.stream(), state_, most, guests(), free_slots(),
               since);
    SOK_LAUNCH(finish_release_kernel, 1, scope.stream(), state_, most);
    if (most == 0) most_guests_ = 0;
    return true;
  }

  // Before a call in which so many keys may become guests.
  void make_room_for_guests(int64_t n) {
    const int64_t guests = std::min(most_guests_ + n, most_slots());
    guests_->grow(guests * kItemBytes);
    most_guests_ = guests;
  }

  void export_slots(const sok_context& context, int64_t first_slot, int64_t n, int64_t* keys, int64_t* slots,
                    int64_t* count) const override;

  // Before a call with so many keys to be inserted.
  void make_room_for(const Scope& scope, const Report& report, int64_t n) {
    const News news = this->news();
    const int64_t more = inserted_ - news.inserted + n;
    // Guests are counted with the rows: at worst the index grows, or is taken to be full, too early.
    const auto make_room_after = [&](const State& state, int64_t keys) {
      make_room(scope, report, std::min(state.next_slot - state.num_free + keys, capacity()),
                std::min(state.next_slot + keys, most_slots()));
    };
    try {
      make_room_after(news.state, more);
    } catch (const Error& error) {
      // Fewer keys may have come than were asked for: it is worth waiting to see.
      if (error.code() != SOK_RESOURCE_EXHAUSTED || is_capturing(scope.stream())) throw;
      make_room_after(exact(scope), n);
    }
    inserted_ += n;
    was_captured_ |= is_capturing(scope.stream());
    count_slots();
  }

  // After make_room_for: whether more keys may have been brought than it takes.
  bool may_be_full() const {
    const News news = this->news();
    return news.state.next_slot - news.state.num_free + inserted_ - news.inserted > capacity();
  }

  void make_room_for_free(int64_t n) {
    const News news = this->news();
    const int64_t slots = std::min(num_slots(), news.state.num_free + erased_ - news.erased + n);
    if (slots * kItemBytes > free_->backed_bytes()) free_->grow(slots * kItemBytes);
    erased_ += n;
  }

  IndexView view(int32_t number) const {
    return {space(),
            keys(),
            free_slots(),
            guests(),
            state_,
            news_,
            std::min(capacity(), segments_.rows()),
            std::min(max_slots(), most_slots()),
            free_->backed_bytes() / kItemBytes,
            0,
            0,
            inserted_,
            erased_,
            number,
            false};
  }

  // As it is called in a report of a call of which it is the index at `position`.
  TableId id(const sok_context& context, int32_t position) const {
    TableId result;
    result.name = name().c_str();
    result.number = has_error_record(context) ? context.errors->keeper->names.number_of(result.name) : position;
    return result;
  }

 private:
  int64_t* guests() const { return guests_ != nullptr ? reinterpret_cast<int64_t*>(guests_->data()) : nullptr; }
  void free_memory() noexcept {
    release(state_);
    release_page_locked(news_);
  }

  News news() const {
    const volatile News& seen = *news_;
    News result;
    result.inserted = seen.inserted;  // first: older numbers beside a newer state do no harm
    result.erased = seen.erased;
    std::atomic_thread_fence(std::memory_order_acquire);
    copy_known(seen.state, result.state);
    if (result.inserted < cleared_) {
      result.inserted = cleared_;
      result.state.next_slot = result.state.num_free = 0;
    }
    return result;
  }

  // Waits for it; what the host knows is up to date then.
  State exact(const Scope& scope) const {
    SOK_CHECK_STATUS(SOK_FAILED_PRECONDITION, !is_capturing(scope.stream()), "table '", name(),
                     "': how many keys it holds cannot be waited for while the stream is being captured in a CUDA "
                     "graph");
    State state = {};
    SOK_CUDA_CHECK(cudaMemcpyAsync(&state, state_, sizeof(state), cudaMemcpyDeviceToHost, scope.stream()));
    SOK_CUDA_CHECK(cudaStreamSynchronize(scope.stream()));
    volatile News& seen = *news_;  // in the order in which finish_kernel writes
    copy_known(state, seen.state);
    std::atomic_thread_fence(std::memory_order_release);
    seen.inserted = inserted_;
    seen.erased = erased_;
    count_slots();
    return state;
  }

  // Now, and not whenever it is asked: columns that are looked at one after the other have as many slots.
  void count_slots() const {
    const News news = this->news();
    num_slots_ = std::min({most_slots(), max_slots(), news.state.next_slot + inserted_ - news.inserted});
  }

  // Slots that there is room for.
  int64_t max_slots() const { return std::min(slot_limit(), keys_->backed_bytes() / kItemBytes); }

  void make_room(const Scope& scope, const Report& report, int64_t rows, int64_t slots) {
    const bool grows = slots * kItemBytes > keys_->backed_bytes() || segments_.moves_before(rows) > 0;
    if (!grows) return;
    SOK_CHECK_STATUS(SOK_FAILED_PRECONDITION, !is_capturing(scope.stream()), "table '", name(),
                     "': its index cannot grow while the stream is being captured in a CUDA graph; reserve room for ",
                     rows, " keys before");
    keys_->grow(slots * kItemBytes);
    while (const int64_t moves = segments_.moves_before(rows)) move_groups(scope, report, moves);
  }

  // The next ones, as many as fit into some temporary memory.
  void move_groups(const Scope& scope, const Report& report, int64_t moves) {
    constexpr int64_t kTemporarySegments = 1024;
    const int64_t each = segments_.group_segments();
    const int64_t count = std::min(moves, std::max<int64_t>(1, kTemporarySegments / each));
    const size_t bytes = static_cast<size_t>(count * each * kSegmentBytes);
    const Buffer<HashEntry> entries(scope.context(), count * each * kSegmentEntries);
    if (!segments_.is_growing()) {
      const int64_t before = segments_.count() * kSegmentBytes, after = segments_.next() * kSegmentBytes;
      buckets_->grow(after);
      SOK_CUDA_CHECK(
          cudaMemsetAsync(buckets_->data() + before, 0, static_cast<size_t>(after - before), scope.stream()));
    }
    char* const from = buckets_->data() + (segments_.group() - count + 1) * each * kSegmentBytes;
    SOK_CUDA_CHECK(cudaMemcpyAsync(entries.data(), from, bytes, cudaMemcpyDeviceToDevice, scope.stream()));
    SOK_CUDA_CHECK(cudaMemsetAsync(from, 0, bytes, scope.stream()));
    for (int64_t i = 0; i < count; ++i) segments_.move();
    SOK_LAUNCH(move_kernel, ceil_div(entries.size(), kThreads), scope.stream(), entries.data(), entries.size(), space(),
               id(scope.context(), 0).number, report.errors());
  }

  State* state_ = nullptr;
  News* news_ = nullptr;
  int64_t inserted_ = 0, erased_ = 0;  // keys that calls have brought
  int64_t cleared_ = 0;                // inserted_ at the last clear
  bool was_captured_ = false;          // in a CUDA graph
  int64_t most_guests_ = 0;            // there are no more of them
  mutable std::atomic<int64_t> num_slots_{0};
};

Index& index_of(const HashRequest& request) { return static_cast<Index&>(*request.index); }

// A call's descriptions in device memory, and its temporary memory.
class Work {
 public:
  // Requests of an index follow each other, so that the numbers of its keys do; indices in the order of their first.
  Work(const Scope& scope, const std::vector<HashRequest>& requests) {
    for (const HashRequest& request : requests) {
      Index* const index = &index_of(request);
      if (std::find(indices_.begin(), indices_.end(), index) != indices_.end()) continue;
      indices_.push_back(index);
      firsts_.push_back(&request);
    }
    num_guests_.resize(indices_.size());
    for (size_t t = 0; t < indices_.size(); ++t) {
      ids_.push_back(indices_[t]->id(scope.context(), static_cast<int32_t>(t)));
      begins_.push_back(num_keys_);
      for (const HashRequest& request : requests) {
        if (&index_of(request) != indices_[t] || request.keys.size == 0) continue;
        items_.push_back({request.keys.data, request.slots, request.is_new, request.allowed, request.asked, num_keys_,
                          static_cast<uint32_t>(t), request.keys.is_64bit, request.marks_repeats});
        num_keys_ += request.keys.size;
        num_guests_[t] += request.allowed != nullptr ? request.keys.size : 0;
        has_guests_ = has_guests_ || request.allowed != nullptr;
      }
      has_policies_ = has_policies_ || has_guests_ || firsts_[t]->eviction != nullptr;
    }
    begins_.push_back(num_keys_);
  }

  bool is_empty() const { return num_keys_ == 0; }
  bool has_policies() const { return has_policies_; }
  const std::vector<Index*>& indices() const { return indices_; }
  const std::vector<TableId>& ids() const { return ids_; }
  int64_t num_keys(size_t table) const { return begins_[table + 1] - begins_[table]; }
  int64_t num_guests(size_t table) const { return num_guests_[table]; }

  // Room has been made.
  Call send(const Scope& scope, Purpose purpose, sok_error_record* errors) {
    std::vector<IndexView> tables;
    for (size_t t = 0; t < indices_.size(); ++t) {
      tables.push_back(indices_[t]->view(ids_[t].number));
      tables.back().begin = begins_[t];
      tables.back().end = begins_[t + 1];
      tables.back().expires = firsts_[t]->expires;
    }
    const size_t table_place = upload_.add(tables), item_place = upload_.add(items_);
    Call call = {};
    if (purpose == Purpose::kInsert && has_policies_) {
      add_evictions(scope);
      const size_t eviction_place = upload_.add(evictions_);
      gate_ = Buffer<Gate>(scope.context(), 1);
      upload_.send(scope, &gate_.data()->is_shut, errors);
      call.evictions = upload_.at<EvictionView>(eviction_place);
    } else {
      upload_.send(scope);
    }
    call.tables = upload_.at<IndexView>(table_place);
    call.items = upload_.at<Item>(item_place);
    call.num_tables = static_cast<uint32_t>(tables.size());
    call.num_items = static_cast<uint32_t>(items_.size());
    call.num_keys = num_keys_;
    call.errors = errors;
    if (purpose == Purpose::kFind) return call;
    // The numbers of cells are below kNone.
    const int64_t num_cells = int64_t{1} << std::min(31, ceil_log2(2 * num_keys_));
    cells_ = Buffer<uint32_t>(scope.context(), num_cells + 1);
    cell_of_ = Buffer<uint32_t>(scope.context(), num_keys_);
    const int64_t num_ranks = has_guests_ ? 2 : 1, num_sums = ceil_div(num_keys_ + 1, kThreads);
    locals_ = Buffer<uint8_t>(scope.context(), num_ranks * (num_keys_ + 1));
    sums_ = Buffer<uint32_t>(scope.context(), num_ranks * num_sums);
    if (purpose == Purpose::kInsert) rooms_ = Buffer<uint32_t>(scope.context(), num_keys_);
    if (gate_.data() == nullptr) gate_ = Buffer<Gate>(scope.context(), 1);
    SOK_CUDA_CHECK(
        cudaMemsetAsync(cells_.data(), 0xff, static_cast<size_t>(num_cells + 1) * sizeof(uint32_t), scope.stream()));
    call.cells = cells_.data();
    call.cell_mask = static_cast<uint32_t>(num_cells - 1);
    call.cell_of = cell_of_.data();
    call.rooms = rooms_.data();
    call.chosen = {locals_.data(), sums_.data()};
    if (has_guests_) call.guests = {locals_.data() + num_keys_ + 1, sums_.data() + num_sums};
    call.gate = gate_.data();
    return call;
  }

  // After check: rows that go where an index is full. Whether one may be.
  bool give_up_rows(const Scope& scope, const Call& call) const {
    if (!may_evict_) return false;
    std::vector<int32_t> numbers;
    for (const TableId& id : ids_) numbers.push_back(id.number);
    cuda::give_up_rows(scope, evictions_, call.evictions, numbers, &call.gate->is_shut, call.errors);
    return true;
  }

 private:
  // Views of what gives up rows, and memory for the rows that go where an index may be full.
  void add_evictions(const Scope& scope) {
    for (size_t t = 0; t < indices_.size(); ++t) {
      auto* const eviction = static_cast<Eviction*>(firsts_[t]->eviction);
      const bool may_be_full = eviction != nullptr && eviction->evicts() && indices_[t]->may_be_full();
      evictions_.push_back(eviction != nullptr ? eviction->view(num_keys(t), may_be_full) : EvictionView{});
      if (!may_be_full) continue;
      if (!may_evict_) {
        may_evict_ = true;
        plans_ = Buffer<Plan>(scope.context(), static_cast<int64_t>(indices_.size()));
        gone_ = Buffer<int64_t>(scope.context(), 3 * num_keys_);
        SOK_CUDA_CHECK(cudaMemsetAsync(plans_.data(), 0, indices_.size() * sizeof(Plan), scope.stream()));
      }
      EvictionView& view = evictions_.back();
      view.plan = plans_.data() + t;
      const auto rows = [&](int64_t* wanted, int64_t part) {
        return wanted != nullptr ? wanted : gone_.data() + part * num_keys_ + begins_[t];
      };
      view.slots = rows(firsts_[t]->evicted_slots, 0);
      view.keys = rows(firsts_[t]->evicted_keys, 1);
      view.old_scores = rows(nullptr, 2);
    }
  }

  std::vector<Index*> indices_;
  std::vector<const HashRequest*> firsts_;  // of each index
  std::vector<int64_t> num_guests_;         // keys that may become guests, of each index
  bool has_guests_ = false, has_policies_ = false;
  std::vector<TableId> ids_;
  std::vector<int64_t> begins_;
  std::vector<Item> items_;
  int64_t num_keys_ = 0;
  Upload upload_;
  Buffer<uint32_t> cells_, cell_of_, rooms_, sums_;
  Buffer<uint8_t> locals_;
  Buffer<Gate> gate_;
  std::vector<EvictionView> evictions_;
  bool may_evict_ = false;
  Buffer<Plan> plans_;
  Buffer<int64_t> gone_;  // slots, keys and scores of rows that go
};

// In a call to tables of which some have policies.
void insert_by_policies(const Scope& scope, const Work& work, const Call& call) {
  const int64_t blocks = ceil_div(call.num_keys, kThreads);
  const int64_t few = std::min<int64_t>(blocks, 1024);  // that mostly find nothing to do
  SOK_LAUNCH((find_kernel<Purpose::kInsert, true>), blocks, scope.stream(), call);
  SOK_LAUNCH(count_kernel<true>, ceil_div(call.num_keys + 1, kThreads), scope.stream(), call);
  SOK_LAUNCH((check_kernel<Purpose::kInsert, true>), 1, scope.stream(), call);
  const bool may_evict = work.give_up_rows(scope, call);
  if (may_evict) SOK_LAUNCH(evict_kernel, few, scope.stream(), call);
  SOK_LAUNCH(insert_kernel<true>, blocks, scope.stream(), call);
  SOK_LAUNCH((finish_kernel<Purpose::kInsert, true>), std::min<int64_t>(blocks, 128), scope.stream(), call);
  if (may_evict) SOK_LAUNCH(restore_kernel, few, scope.stream(), call);
}

template <Purpose kPurpose>
void change_keys(const Scope& scope, const Call& call) {
  const int64_t blocks = ceil_div(call.num_keys, kThreads);
  SOK_LAUNCH(find_kernel<kPurpose>, blocks, scope.stream(), call);
  SOK_LAUNCH(count_kernel<>, ceil_div(call.num_keys + 1, kThreads), scope.stream(), call);
  SOK_LAUNCH(check_kernel<kPurpose>, 1, scope.stream(), call);
  if constexpr (kPurpose == Purpose::kInsert) {
    SOK_LAUNCH(insert_kernel<false>, blocks, scope.stream(), call);
  } else {
    SOK_LAUNCH(erase_kernel, blocks, scope.stream(), call);
  }
  SOK_LAUNCH(finish_kernel<kPurpose>, std::min<int64_t>(blocks, 128), scope.stream(), call);
}

template <Purpose kPurpose>
void change(const sok_context& context, const std::vector<HashRequest>& requests) {
  const Scope scope(context);
  const Report report(scope);
  Work work(scope, requests);
  SOK_CHECK_STATUS(SOK_FAILED_PRECONDITION,
                   kPurpose != Purpose::kInsert || !work.has_policies() || !is_capturing(scope.stream()), "table '",
                   work.ids().empty() ? "" : work.ids()[0].name,
                   "': inserting into tables that evict or refuse rows cannot be captured in a CUDA graph");
  if (!work.is_empty()) {
    for (size_t t = 0; t < work.indices().size(); ++t) {
      if constexpr (kPurpose == Purpose::kInsert) {
        if (work.num_guests(t) > 0) work.indices()[t]->make_room_for_guests(work.num_guests(t));
        work.indices()[t]->make_room_for(scope, report, work.num_keys(t));
      } else {
        work.indices()[t]->make_room_for_free(work.num_keys(t));
      }
    }
    const Call call = work.send(scope, kPurpose, report.errors());
    if (kPurpose == Purpose::kInsert && work.has_policies()) {
      insert_by_policies(scope, work, call);
    } else {
      change_keys<kPurpose>(scope, call);
    }
  }
  report.finish(work.ids());
}

void Index::export_slots(const sok_context& context, int64_t first_slot, int64_t n, int64_t* keys, int64_t* slots,
                         int64_t* count) const {
  const Scope scope(context);
  const int64_t size = std::clamp<int64_t>(num_slots() - first_slot, 0, n), piece = std::min(size, kSlotsOfExport);
  const Buffer<int64_t> found(scope.context(), piece);
  const Buffer<uint32_t> ranks(scope.context(), piece + 1);
  SOK_CUDA_CHECK(cudaMemsetAsync(count, 0, sizeof(int64_t), scope.stream()));
  for (int64_t first = first_slot; first < first_slot + size; first += piece) {
    const IsAt is_at = {found.data(), first, std::min(piece, first_slot + size - first)};
    const int64_t* const all_keys = this->keys() + first;
    // What was never given out has any number for a key, which is nowhere, or at another slot.
    hash_find(context, {HashRequest{const_cast<Index*>(this), {all_keys, is_at.n, true}, found.data(), nullptr}});
    number(scope, is_at, is_at.n, ranks.data());
    const int64_t num_blocks = ceil_div(is_at.n, kThreads);
    SOK_LAUNCH(export_kernel, num_blocks, scope.stream(), is_at, ranks.data(), all_keys, count, keys, slots);
    SOK_LAUNCH(add_exported_kernel, 1, scope.stream(), ranks.data() + is_at.n, count);
  }
}

int locate(const sok_context* context, int32_t num_requests, const sok_index_request* requests, uint32_t flags) {
  return guarded(__func__, [&]() {
    const std::vector<HashRequest> views = hash_requests(num_requests, requests);
    (flags & SOK_LOCATE_INSERT) != 0 ? hash_find_or_insert(*context, views) : hash_find(*context, views);
  });
}

}  // namespace

std::unique_ptr<sok_hash_index> make_hash_index(const sok_hash_index_config& config, int64_t max_guests) {
  return std::make_unique<Index>(config, max_guests);
}

void hash_find(const sok_context& context, const std::vector<HashRequest>& requests) {
  const Scope scope(context);
  Work work(scope, requests);
  if (work.is_empty()) return;
  const Call call = work.send(scope, Purpose::kFind, nullptr);
  SOK_LAUNCH(find_kernel<Purpose::kFind>, ceil_div(call.num_keys, kThreads), scope.stream(), call);
}

void hash_find_or_insert(const sok_context& context, const std::vector<HashRequest>& requests) {
  change<Purpose::kInsert>(context, requests);
}

void hash_erase(const sok_context& context, const std::vector<HashRequest>& requests) {
  change<Purpose::kErase>(context, requests);
}

}  // namespace sok::cuda
