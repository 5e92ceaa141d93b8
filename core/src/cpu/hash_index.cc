// SPDX-License-Identifier: Apache-2.0
// The hash index on the CPU. Keys are looked for by all workers; what is inserted or erased, by one worker an index, in
// the order of the call.
#include "table/hash_index.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <unordered_map>

#include "common/memory.h"
#include "common/parallel.h"
#include "common/status.h"
#include "cpu/contents.h"
#include "cpu/eviction.h"

namespace sok::cpu {
namespace {

constexpr int64_t kKeysPerTask = 1 << 13;
constexpr int64_t kAhead = 32;  // keys whose memory is asked for before they are looked for

size_t bytes_of(int64_t count, int64_t size) { return static_cast<size_t>(count * size); }

void prefetch(const HashBucket* bucket) {
  __builtin_prefetch(bucket->entries);
  __builtin_prefetch(bucket->entries + HashBucket::kEntries / 2);
}

struct Found {
  HashEntry* entry;  // nullptr: nowhere
  uint32_t passed;   // how many buckets of its path come before it
};

Found find(const HashPath& path, int64_t key) {
  for (uint32_t i = 0; i < HashPath::kLength; ++i) {
    HashEntry* const entries = path[i]->entries;
    // Which of the entries it is cannot be foreseen: all are compared, without branches.
    uint32_t same = 0;
    for (int at = 0; at < HashBucket::kEntries; ++at) same |= static_cast<uint32_t>(entries[at].key == key) << at;
    for (; same != 0; same &= same - 1) {
      HashEntry* const entry = &entries[std::countr_zero(same)];
      if (HashEntry::is_used(entry->word)) return {entry, i};
    }
    if (!HashEntry::is_passed(entries[path.key_class].word)) break;
  }
  return {nullptr, 0};
}

// Of a key that the index does not hold. False, with nothing changed: its segment is full.
bool place(const HashPath& path, int64_t key, int64_t slot) {
  for (uint32_t i = 0; i < HashPath::kLength; ++i) {
    HashEntry* const entries = path[i]->entries;
    for (int at = 0; at < HashBucket::kEntries; ++at) {
      if (HashEntry::is_used(entries[at].word)) continue;
      entries[at] = {key, HashEntry::word_of(entries[at].word, slot)};
      for (uint32_t passed = 0; passed < i; ++passed) path[passed]->entries[path.key_class].word += HashEntry::kOnePass;
      return true;
    }
  }
  return false;
}

void remove(const HashPath& path, const Found& found) {
  found.entry->word &= HashEntry::kPasses;
  for (uint32_t passed = 0; passed < found.passed; ++passed)
    path[passed]->entries[path.key_class].word -= HashEntry::kOnePass;
}

// Calls f(i, path of key(i)) for i in [begin, end), each some time after its memory was asked for.
template <typename Key, typename F>
void walk(const HashSpace& space, int64_t begin, int64_t end, Key&& key, F&& f) {
  HashPath paths[kAhead];
  const auto ask = [&](int64_t i) {
    paths[i % kAhead] = space.path_of(key(i));
    prefetch(paths[i % kAhead][0]);
  };
  for (int64_t i = begin; i < std::min(end, begin + kAhead); ++i) ask(i);
  for (int64_t i = begin; i < end; ++i) {
    const HashPath path = paths[i % kAhead];
    if (i + kAhead < end) ask(i + kAhead);
    f(i, path);
  }
}

struct Position {  // of a key in a call
  const HashRequest* request;
  int64_t at;

  int64_t key() const { return integer_at(request->keys, at); }
  bool is_allowed() const { return request->allowed == nullptr || request->allowed[at] != 0; }
};

class Index final : public sok_hash_index {
 public:
  Index(const sok_hash_index_config& config, int64_t max_guests, decltype(sok_index::locate) locate)
      : sok_hash_index(config, max_guests, locate) {
    buckets_ = reserve_range(range_config(segments_.most() * kSegmentBytes));
    keys_ = reserve_range(range_config(most_slots() * int64_t{sizeof(int64_t)}));
    free_ = reserve_range(range_config(most_slots() * int64_t{sizeof(int64_t)}));
    buckets_->grow(segments_.count() * kSegmentBytes);
    keys_->grow(config.initial_rows * int64_t{sizeof(int64_t)});
  }

  void reserve(const sok_context& context, int64_t rows) override {
    keys_->grow(rows * int64_t{sizeof(int64_t)});
    while (segments_.moves_before(rows) > 0) {
      buckets_->grow(segments_.next() * kSegmentBytes);
      move_group(context);
    }
  }

  void clear(const sok_context& context) override {
    Chunks chunks;
    chunks.add(segments_.in_use(), 8);
    parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
      const Chunks::Range range = chunks[task];
      std::memset(buckets_->data() + range.begin * kSegmentBytes, 0, bytes_of(range.end - range.begin, kSegmentBytes));
    });
    next_slot_ = num_free_ = 0;
    guest_slots_.clear();
  }

  int64_t size(const sok_context&) const override { return size(); }
  int64_t size() const { return next_slot_ - num_free_ - num_guests(); }
  int64_t num_slots() const override { return next_slot_; }
  int64_t num_insertions() const override { return num_insertions_; }
  int64_t num_evictions() const override { return num_evictions_; }
  int64_t num_expirations() const override { return num_expirations_; }
  int64_t num_guests_ever() const override { return num_guests_ever_; }

  bool release_guests(const sok_context&, int64_t most, int32_t* since) override {
    if (num_guests() <= most) return false;
    make_room_for_free(num_guests());
    for (; !guest_slots_.empty(); guest_slots_.pop_back()) {
      since[guest_slots_.back()] = INT32_MAX;
      free_slots()[num_free_++] = guest_slots_.back();
    }
    return true;
  }

  // A slot is in use where its key is found at it.
  void export_slots(const sok_context& context, int64_t first_slot, int64_t n, int64_t* keys, int64_t* slots,
                    int64_t* count) const override {
    const int64_t size = std::clamp<int64_t>(next_slot_ - first_slot, 0, n);
    const Buffer<uint8_t> in_use(context, size);
    Chunks chunks;
    chunks.add(size, kKeysPerTask);
    std::vector<int64_t> ends(static_cast<size_t>(chunks.count()));
    const int64_t* const all_keys = this->keys() + first_slot;
    parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
      const Chunks::Range range = chunks[task];
      int64_t found = 0;
      walk(
          space(), range.begin, range.end, [&](int64_t i) { return all_keys[i]; },
          [&](int64_t i, const HashPath& path) {
            const HashEntry* const entry = find(path, all_keys[i]).entry;
            in_use[i] = entry != nullptr && HashEntry::slot_of(entry->word) == first_slot + i;
            found += in_use[i];
          });
      ends[static_cast<size_t>(task)] = found;
    });
    int64_t total = 0;
    for (int64_t& end : ends) end = total += end;
    parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
      const Chunks::Range range = chunks[task];
      int64_t at = task == 0 ? 0 : ends[static_cast<size_t>(task) - 1];
      for (int64_t i = range.begin; i < range.end; ++i) {
        if (in_use[i] == 0) continue;
        keys[at] = all_keys[i];
        slots[at++] = first_slot + i;
      }
    });
    *count = total;
  }

  // Whether it holds all of these.
  bool find_range(const HashRequest& request, int64_t begin, int64_t end) const {
    bool has_all = true;
    walk(
        space(), begin, end, [&](int64_t i) { return integer_at(request.keys, i); },
        [&](int64_t i, const HashPath& path) {
          const HashEntry* const entry = find(path, integer_at(request.keys, i)).entry;
          request.slots[i] = entry == nullptr ? -1 : HashEntry::slot_of(entry->word);
          has_all &= entry != nullptr;
        });
    return has_all;
  }

  // So that so many missing keys may be inserted, or become guests.
  void make_room_for(const sok_context& context, int64_t n) {
    reserve(context, std::min(size() + n, capacity()));
    keys_->grow(std::min(next_slot_ - num_free_ + n, most_slots()) * int64_t{sizeof(int64_t)});
  }

  // What find_range did not find. Room has been made. `commit` or `undo` is to be called afterwards.
  Fault insert(const sok_context& context, const std::vector<Position>& missing, Eviction* eviction) {
    const HashSpace space = this->space();
    undo_next_slot_ = next_slot_;
    inserted_.clear();
    evicted_.clear();
    std::unordered_map<int64_t, int64_t> guests;  // the slots that keys have got
    Fault fault = Fault::kNone;
    walk(
        space, 0, static_cast<int64_t>(missing.size()),
        [&](int64_t i) { return missing[static_cast<size_t>(i)].key(); },
        [&](int64_t i, const HashPath& path) {
          if (fault != Fault::kNone) return;
          const Position& position = missing[static_cast<size_t>(i)];
          const int64_t key = position.key();
          int64_t& slot = position.request->slots[position.at];
          if (const HashEntry* const entry = find(path, key).entry; entry != nullptr) {
            slot = HashEntry::slot_of(entry->word);
            return;
          }
          if (!position.is_allowed()) {
            const auto [guest, is_first] = guests.try_emplace(key, -1);
            if (is_first) guest->second = add_guest(key, eviction, position);
            slot = guest->second;
            if (slot < 0) fault = Fault::kManyGuests;
            return;
          }
          const bool is_full = size() == capacity();
          if (is_full) {
            slot = eviction == nullptr || !eviction->evicts() ? -1 : evict(context, *eviction);
          } else {
            slot = num_free_ > 0 ? free_slots()[num_free_ - 1] : next_slot_;
          }
          if (slot < 0 || !place(path, key, slot)) {
            fault = slot < 0 ? Fault::kFull : Fault::kCollision;
            return;
          }
          if (!is_full) num_free_ > 0 ? --num_free_ : ++next_slot_;
          give(slot, key, position);
          if (eviction != nullptr) eviction->use_first(slot);
        });
    return fault;
  }

  void commit(const HashRequest& request, Eviction* eviction) {
    const auto guests =
        std::count_if(inserted_.begin(), inserted_.end(), [](const Given& each) { return each.is_guest; });
    num_guests_ever_ += guests;
    num_insertions_ += static_cast<int64_t>(inserted_.size()) - guests;
    num_evictions_ += static_cast<int64_t>(evicted_.size());
    if (evicted_.empty()) return;
    eviction->commit();
    if (request.evicted_keys == nullptr) return;
    for (size_t i = 0; i < evicted_.size(); ++i) {
      request.evicted_keys[i] = evicted_[i].key;
      request.evicted_slots[i] = evicted_[i].slot;
    }
  }

  // Takes back what `insert` did.
  void undo(Eviction* eviction) {
    for (; !inserted_.empty(); inserted_.pop_back()) {
      const auto [slot, is_guest] = inserted_.back();
      const bool has_evicted = !is_guest && !evicted_.empty() && evicted_.back().slot == slot;
      is_guest ? guest_slots_.pop_back() : take_out(keys()[slot]);
      if (eviction != nullptr) eviction->restore(slot, Eviction::kNoKey);
      if (has_evicted) {
        put_back(eviction);
      } else if (slot < undo_next_slot_) {
        free_slots()[num_free_++] = slot;
      }
    }
    if (!evicted_.empty()) put_back(eviction);  // the key in its place found none
    next_slot_ = undo_next_slot_;
  }

  // So that `n` slots may become free.
  void make_room_for_free(int64_t n) { free_->grow(std::min(num_free_ + n, next_slot_) * int64_t{sizeof(int64_t)}); }

  void erase(const HashRequest& request) {
    walk(
        space(), 0, request.keys.size, [&](int64_t i) { return integer_at(request.keys, i); },
        [&](int64_t i, const HashPath& path) {
          request.slots[i] = -1;
          if (request.asked != nullptr && request.asked[i] == 0) return;
          const Found found = find(path, integer_at(request.keys, i));
          if (found.entry == nullptr) return;
          request.slots[i] = free_slots()[num_free_++] = HashEntry::slot_of(found.entry->word);
          num_expirations_ += request.expires ? 1 : 0;
          remove(path, found);
        });
  }

 private:
  struct Given {
    int64_t slot;
    bool is_guest;
  };
  struct Evicted {
    int64_t slot, key, score;
  };

  void give(int64_t slot, int64_t key, const Position& position, bool is_guest = false) {
    keys()[slot] = key;
    if (position.request->is_new != nullptr) position.request->is_new[position.at] = 1;
    inserted_.push_back({slot, is_guest});
  }

  // Its slot; -1: there is no room.
  int64_t add_guest(int64_t key, Eviction* eviction, const Position& position) {
    if (num_free_ == 0 && next_slot_ == most_slots()) return -1;
    const int64_t slot = num_free_ > 0 ? free_slots()[--num_free_] : next_slot_++;
    guest_slots_.push_back(slot);
    give(slot, key, position, true);
    if (eviction != nullptr) eviction->scores()[slot] = Eviction::kNoKey;
    return slot;
  }

  void take_out(int64_t key) {
    const HashPath path = space().path_of(key);
    remove(path, find(path, key));
  }

  // Frees a slot for the key that is to have it. -1: no row may go.
  int64_t evict(const sok_context& context, Eviction& eviction) {
    const int64_t slot = eviction.next(context, next_slot_);
    if (slot < 0) return -1;
    evicted_.push_back({slot, keys()[slot], eviction.scores()[slot]});
    take_out(keys()[slot]);
    return slot;
  }

  // The last one. There is room for it: what came in its place has gone.
  void put_back(Eviction* eviction) {
    const Evicted& last = evicted_.back();
    place(space().path_of(last.key), last.key, last.slot);
    keys()[last.slot] = last.key;
    eviction->restore(last.slot, last.score);
    evicted_.pop_back();
  }

  // Spreads the keys of a group of segments over one segment more.
  void move_group(const sok_context& context) {
    const HashSegments before = segments_;
    const int64_t from_count = segments_.group_segments(), to_count = from_count + 1, group = segments_.group();
    char* const from = buckets_->data() + group * from_count * kSegmentBytes;
    char* const to = buckets_->data() + group * to_count * kSegmentBytes;
    const Buffer<HashEntry> entries(context, from_count * kSegmentEntries);
    std::memcpy(entries.data(), from, bytes_of(from_count, kSegmentBytes));
    std::memset(from, 0, bytes_of(from_count, kSegmentBytes));
    segments_.move();
    const HashSpace space = this->space();
    std::atomic<bool> is_placed{true};
    parallel_for(context, to_count, [&](int64_t task, int32_t) {
      // Hashes ascend with segments: what belongs here was in two of them at most.
      HashBucket* const segment = reinterpret_cast<HashBucket*>(to + task * kSegmentBytes);
      const int64_t begin = std::max<int64_t>(0, task - 1), end = std::min(from_count, task + 1);
      for (int64_t i = begin * kSegmentEntries; i < end * kSegmentEntries; ++i) {
        const HashEntry& entry = entries[i];
        if (!HashEntry::is_used(entry.word)) continue;
        const HashPath path = space.path_of(entry.key);
        if (path.segment != segment) continue;
        if (!place(path, entry.key, HashEntry::slot_of(entry.word))) is_placed = false;
      }
    });
    if (is_placed) return;
    std::memset(to, 0, bytes_of(to_count, kSegmentBytes));
    std::memcpy(from, entries.data(), bytes_of(from_count, kSegmentBytes));
    segments_ = before;
    throw_found({Fault::kCollision, 0, size(), kSegmentEntries}, name().c_str());
  }

  int64_t num_guests() const { return static_cast<int64_t>(guest_slots_.size()); }

  int64_t next_slot_ = 0, num_free_ = 0;
  int64_t num_insertions_ = 0, num_evictions_ = 0, num_expirations_ = 0, num_guests_ever_ = 0;
  std::vector<int64_t> guest_slots_;
  int64_t undo_next_slot_ = 0;
  std::vector<Given> inserted_;   // by the last call of insert
  std::vector<Evicted> evicted_;  // by that call
};

Index& index_of(const HashRequest& request) { return static_cast<Index&>(*request.index); }
Eviction* eviction_of(const HashRequest& request) { return static_cast<Eviction*>(request.eviction); }

// Returns where keys are that an index does not hold.
std::vector<Chunks::Range> find_all(const sok_context& context, const std::vector<HashRequest>& requests) {
  Chunks chunks;
  for (const HashRequest& request : requests) chunks.add(request.keys.size, kKeysPerTask);
  std::vector<uint8_t> has_all(static_cast<size_t>(chunks.count()));
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    const HashRequest& request = requests[static_cast<size_t>(range.item)];
    has_all[static_cast<size_t>(task)] = index_of(request).find_range(request, range.begin, range.end) ? 1 : 0;
  });
  std::vector<Chunks::Range> lacking;
  for (int64_t task = 0; task < chunks.count(); ++task) {
    if (has_all[static_cast<size_t>(task)] == 0) lacking.push_back(chunks[task]);
  }
  return lacking;
}

// Rows that were found have been used.
void use(const sok_context& context, const std::vector<HashRequest>& requests) {
  Chunks chunks;
  for (const HashRequest& request : requests) {
    chunks.add(request.eviction != nullptr ? request.keys.size : 0, kKeysPerTask);
  }
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t) {
    const Chunks::Range range = chunks[task];
    const HashRequest& request = requests[static_cast<size_t>(range.item)];
    eviction_of(request)->use(request.slots + range.begin, range.end - range.begin);
  });
}

int locate(const sok_context* context, int32_t num_requests, const sok_index_request* requests, uint32_t flags) {
  return guarded(__func__, [&]() {
    const std::vector<HashRequest> asked = hash_requests(num_requests, requests);
    (flags & SOK_LOCATE_INSERT) != 0 ? hash_find_or_insert(*context, asked) : hash_find(*context, asked);
  });
}

}  // namespace

std::unique_ptr<sok_hash_index> make_hash_index(const sok_hash_index_config& config, int64_t max_guests) {
  return std::make_unique<Index>(config, max_guests, locate);
}

void hash_find(const sok_context& context, const std::vector<HashRequest>& requests) { find_all(context, requests); }

void hash_find_or_insert(const sok_context& context, const std::vector<HashRequest>& requests) {
  struct Job {
    const HashRequest* first;
    Index* index;
    Eviction* eviction;
    std::vector<Position> missing;
    Fault fault;
  };
  std::vector<Job> jobs;
  std::vector<size_t> job_of;
  for (const HashRequest& request : requests) {
    if (request.is_new != nullptr) std::fill_n(request.is_new, request.keys.size, uint8_t{0});
    Index* const index = &index_of(request);
    auto job = std::find_if(jobs.begin(), jobs.end(), [&](const Job& each) { return each.index == index; });
    if (job == jobs.end()) job = jobs.insert(jobs.end(), {&request, index, eviction_of(request), {}, Fault::kNone});
    job_of.push_back(static_cast<size_t>(job - jobs.begin()));
  }
  for (const Chunks::Range& range : find_all(context, requests)) {
    const HashRequest& request = requests[static_cast<size_t>(range.item)];
    for (int64_t i = range.begin; i < range.end; ++i) {
      if (request.slots[i] < 0) jobs[job_of[static_cast<size_t>(range.item)]].missing.push_back({&request, i});
    }
  }
  for (const Job& job : jobs) {
    if (job.missing.empty()) continue;
    job.index->make_room_for(context, static_cast<int64_t>(job.missing.size()));
  }
  use(context, requests);
  sok_context alone = context;  // of the workers none calls the others
  alone.executor.run = nullptr;
  parallel_for(context, static_cast<int64_t>(jobs.size()), [&](int64_t i, int32_t) {
    Job& job = jobs[static_cast<size_t>(i)];
    job.fault = job.index->insert(jobs.size() > 1 ? alone : context, job.missing, job.eviction);
  });
  const auto failed = std::find_if(jobs.begin(), jobs.end(), [](const Job& job) { return job.fault != Fault::kNone; });
  if (failed == jobs.end()) {
    for (const Job& job : jobs) job.index->commit(*job.first, job.eviction);
    return;
  }
  for (const Job& job : jobs) job.index->undo(job.eviction);
  const Index& index = *failed->index;
  const bool evicts = failed->eviction != nullptr && failed->eviction->evicts();
  const Fault fault = failed->fault == Fault::kFull && evicts ? Fault::kManyKeys : failed->fault;
  const int64_t limit = fault == Fault::kCollision    ? kSegmentEntries
                        : fault == Fault::kManyGuests ? index.most_slots() - index.size()
                                                      : index.capacity();
  throw_found({fault, 0, index.size(), limit}, index.name().c_str());
}

void hash_erase(const sok_context& context, const std::vector<HashRequest>& requests) {
  std::vector<Index*> indices;
  std::vector<int64_t> num_keys;
  for (const HashRequest& request : requests) {
    Index* const index = &index_of(request);
    const auto known = std::find(indices.begin(), indices.end(), index);
    if (known == indices.end()) {
      indices.push_back(index);
      num_keys.push_back(request.keys.size);
    } else {
      num_keys[static_cast<size_t>(known - indices.begin())] += request.keys.size;
    }
  }
  for (size_t i = 0; i < indices.size(); ++i) indices[i]->make_room_for_free(num_keys[i]);
  parallel_for(context, static_cast<int64_t>(indices.size()), [&](int64_t i, int32_t) {
    for (const HashRequest& request : requests) {
      if (&index_of(request) == indices[static_cast<size_t>(i)]) indices[static_cast<size_t>(i)]->erase(request);
    }
  });
}

}  // namespace sok::cpu
