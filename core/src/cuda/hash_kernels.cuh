// SPDX-License-Identifier: Apache-2.0
// The kernels of a hash index, in the order of a call that inserts or erases: find, count, check, insert or erase,
// finish. In a call to tables with policies (kPolicies: eviction, expiry, admission) find marks uses, insert gives
// scores, and keys may be passed over or become guests; where one may be full, rows that go are chosen after check
// (cuda/eviction.h), then come evict, insert, finish, and restore if something failed.
#ifndef SOK_CUDA_HASH_KERNELS_CUH_
#define SOK_CUDA_HASH_KERNELS_CUH_

#include "common/error_record.h"
#include "cuda/add_up.cuh"
#include "cuda/eviction.h"
#include "cuda/hash_probe.cuh"
#include "cuda/placement.cuh"
#include "cuda/report.cuh"
#include "cuda/vector.cuh"
#include "table/hash_index.h"

namespace sok::cuda {
namespace {

constexpr uint32_t kNone = UINT32_MAX;

// How many slots were given out, how many of them are free and guests' (HashRequest::allowed), and what has happened to
// keys so far.
struct State {
  int64_t next_slot, num_free, num_guests, num_insertions, num_evictions, num_expirations, num_guests_ever;

  __host__ __device__ int64_t size() const { return next_slot - num_free - num_guests; }
};

// What the host sees of it, in its own memory, without waiting: the state after some call, and how many keys the calls
// up to that one brought to be inserted and erased. A newer state beside older numbers does no harm.
struct News {
  State state;
  int64_t inserted, erased;
};

// What the host is told of a state, number by number, for the device may be writing.
template <typename From, typename To>
inline void copy_known(const From& from, To& to) {
  to.next_slot = from.next_slot;
  to.num_free = from.num_free;
  to.num_insertions = from.num_insertions;
  to.num_evictions = from.num_evictions;
  to.num_expirations = from.num_expirations;
  to.num_guests_ever = from.num_guests_ever;
}

struct IndexView {
  HashSpace space;
  int64_t* keys;
  int64_t *free_slots, *guests;
  State* state;
  News* news;
  int64_t max_rows, max_slots, max_free;  // what there is room for
  int64_t begin, end;                     // its keys among those of the call
  int64_t inserted, erased;               // for the news
  int32_t number;                         // what a report calls it
  bool expires;                           // keys that are erased count as expired
};

struct Item {  // a request
  const void* keys;
  int64_t* slots;
  uint8_t* is_new;
  const uint8_t *allowed, *asked;  // of HashRequest
  int64_t begin;                   // its first key among those of the call
  uint32_t table;
  bool keys_64bit, marks_repeats;
};

enum class Purpose { kFind, kInsert, kErase };

struct Gate {
  int32_t is_shut;   // nothing is to be inserted or erased: 1 for what was wrong before, 2 for what is wrong here
  int32_t collides;  // a segment was full
};

// How many numbers of a call are counted before each, one flag a number.
struct Ranks {
  uint8_t* locals;  // [num_keys + 1], among the kThreads that it is one of; nullptr: none are
  uint32_t* sums;   // for each kThreads of them, how many they are; after check: before these

  __device__ __forceinline__ int64_t of(int64_t i) const { return int64_t{sums[i / kThreads]} + locals[i]; }
  __device__ __forceinline__ int64_t between(int64_t begin, int64_t end) const {
    return locals != nullptr ? of(end) - of(begin) : 0;
  }
};

struct Call {
  const IndexView* tables;
  const Item* items;
  uint32_t num_tables, num_items;
  int64_t num_keys;
  // Where keys that are to be inserted or erased meet: at the first cell from the one that their hash names that is
  // empty or has their key, stands the lowest number of one of their occurrences. One more, behind them, is kNone as
  // long as there is no such key: most calls in training bring none, and what follows find has nothing to do then.
  uint32_t* cells;
  uint32_t cell_mask;
  uint32_t* cell_of;  // [num_keys], kNone where nothing is to be done
  uint32_t* rooms;    // [num_keys], of keys to be inserted: room_in
  Ranks chosen;
  Ranks guests;  // of those chosen, with policies
  Gate* gate;
  sok_error_record* errors;
  const EvictionView* evictions;  // of the tables, with policies

  __device__ __forceinline__ const Item& item_of(int64_t i) const {
    return items[last_at_or_before(num_items, i, [&](uint32_t at) { return __ldg(&items[at].begin); })];
  }
  __device__ __forceinline__ static int64_t key_of(const Item& item, int64_t i) {
    return load_integer(item.keys, item.keys_64bit, i - item.begin);
  }
  __device__ __forceinline__ uint32_t* any_chosen() const { return cells + uint64_t{cell_mask} + 1; }
  __device__ __forceinline__ bool is_any_chosen() const { return *any_chosen() != kNone; }
  __device__ __forceinline__ bool is_chosen(int64_t i) const { return cell_of[i] != kNone && cells[cell_of[i]] == i; }
  // Of one that is chosen to be inserted: whether it is a guest instead.
  __device__ __forceinline__ bool is_guest(int64_t i) const {
    const Item& item = item_of(i);
    return item.allowed != nullptr && item.allowed[i - item.begin] == 0;
  }
  __device__ __forceinline__ int64_t num_chosen(const IndexView& table) const {
    return is_any_chosen() ? chosen.of(table.end) - chosen.of(table.begin) : 0;
  }
  __device__ __forceinline__ int64_t num_guests(const IndexView& table) const {
    return is_any_chosen() ? guests.between(table.begin, table.end) : 0;
  }
};

__device__ __forceinline__ uint32_t meet(const Call& p, const Item& item, int64_t i, int64_t key) {
  uint32_t at = (static_cast<uint32_t>(hash_of(key) >> 20) + item.table * 0x9e3779b9u) & p.cell_mask;
  const uint32_t number = static_cast<uint32_t>(i);
  for (;; at = (at + 1) & p.cell_mask) {
    uint32_t other = *const_cast<volatile uint32_t*>(&p.cells[at]);
    if (other == kNone) other = atomicCAS(&p.cells[at], kNone, number);
    if (other == kNone) return at;
    const Item& its_item = p.item_of(other);
    if (its_item.table != item.table || Call::key_of(its_item, other) != key) continue;
    if (number < other) atomicMin(&p.cells[at], number);
    return at;
  }
}

__device__ __forceinline__ void use(const EvictionView& eviction, int64_t slot) {
  volatile int64_t* const score = &eviction.scores[slot];
  const int64_t held = *score;
  // A row is used once a call, however often its key occurs there: who comes at the same time writes the same.
  if (Uses::last_use_of(held) != eviction.uses.generation) *score = eviction.uses.again(held);
}

// With kPolicies the gate says already whether something was wrong before.
template <Purpose kPurpose, bool kPolicies = false>
__global__ void __launch_bounds__(kThreads) find_kernel(const __grid_constant__ Call p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool is_there = i < p.num_keys;
  const Item& item = p.item_of(is_there ? i : 0);
  bool is_asked = is_there;
  if constexpr (kPolicies || kPurpose == Purpose::kErase) {
    if (is_there && item.asked != nullptr) is_asked = item.asked[i - item.begin] != 0;
  }
  const int64_t key = is_asked ? Call::key_of(item, i) : 0;
  // Tiles at the border of two tables take turns.
  int64_t slot = -1;
  uint32_t room = kNoRoom;
  unsigned left = __ballot_sync(kWholeWarp, is_asked);
  while (left != 0) {
    const uint32_t table = __shfl_sync(kWholeWarp, item.table, __ffs(left) - 1);
    const bool now = is_asked && item.table == table;
    uint32_t its_room = kNoRoom;
    const int64_t found = find_slots<kPurpose == Purpose::kInsert>(p.tables[table].space, key, now, &its_room);
    if (now) slot = found, room = its_room;
    left &= ~__ballot_sync(kWholeWarp, now);
  }
  if (is_there) item.slots[i - item.begin] = slot;
  if constexpr (kPolicies) {
    const EvictionView& eviction = p.evictions[item.table];
    if (slot >= 0 && eviction.scores != nullptr && p.gate->is_shut == 0) use(eviction, slot);
  }
  if constexpr (kPurpose != Purpose::kFind) {
    const bool is_wanted = is_asked && (kPurpose == Purpose::kInsert ? slot < 0 : slot >= 0);
    if (is_there) {
      p.cell_of[i] = is_wanted ? meet(p, item, i, key) : kNone;
      if (kPurpose == Purpose::kInsert && is_wanted) p.rooms[i] = room;
      if (kPurpose == Purpose::kInsert && item.is_new != nullptr) item.is_new[i - item.begin] = 0;
    }
    if (__syncthreads_or(is_wanted) != 0 && threadIdx.x == 0) *p.any_chosen() = 0;
  }
}

// By a block: its numbers, up to n, of which some are counted.
__device__ __forceinline__ void count(const Ranks& ranks, int64_t i, int64_t n, bool is_counted) {
  __shared__ uint32_t of_warps[kThreads / kWarp];
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const unsigned counted = __ballot_sync(kWholeWarp, is_counted);
  if (lane == 0) of_warps[warp] = __popc(counted);
  __syncthreads();
  uint32_t before = __popc(counted & ((1u << lane) - 1u)), sum = 0;
  for (uint32_t w = 0; w < kThreads / kWarp; ++w) {
    if (w < warp) before += of_warps[w];
    sum += of_warps[w];
  }
  if (i <= n) ranks.locals[i] = static_cast<uint8_t>(before);
  if (threadIdx.x == 0) ranks.sums[blockIdx.x] = sum;
}

template <bool kPolicies = false>
__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ Call p) {
  if (!p.is_any_chosen()) return;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool is_chosen = i < p.num_keys && p.is_chosen(i);
  count(p.chosen, i, p.num_keys, is_chosen);
  if (!kPolicies || p.guests.locals == nullptr) return;
  __syncthreads();
  count(p.guests, i, p.num_keys, is_chosen && p.is_guest(i));
}

// How many rows a table gives up to hold no more than its capacity.
template <bool kPolicies>
__device__ __forceinline__ int64_t num_evicted(const Call& p, uint32_t table, int64_t rows) {
  if (!kPolicies || p.evictions[table].plan == nullptr) return 0;
  return max(int64_t{0}, rows - p.evictions[table].capacity);
}

// Shuts the gate where something was wrong before, or does not fit. One block.
template <Purpose kPurpose, bool kPolicies = false>
__global__ void __launch_bounds__(kThreads) check_kernel(const __grid_constant__ Call p) {
  if (threadIdx.x == 0) *p.gate = {kPolicies ? p.gate->is_shut : (is_recorded(p.errors) ? 1 : 0), 0};
  if (!p.is_any_chosen()) return;
  add_up(p.chosen.sums, p.num_keys / kThreads + 1);
  if (kPolicies && p.guests.locals != nullptr) add_up(p.guests.sums, p.num_keys / kThreads + 1);
  for (uint32_t t = threadIdx.x; t < p.num_tables; t += kThreads) {
    const IndexView& table = p.tables[t];
    const int64_t chosen = p.num_chosen(table);
    const State state = *table.state;
    const int64_t size = state.size();
    bool fits = true;
    if (kPurpose == Purpose::kInsert) {
      const int64_t guests = kPolicies ? p.num_guests(table) : 0, rows = chosen - guests;
      const int64_t need = num_evicted<kPolicies>(p, t, size + rows), more = rows - need;
      const bool rows_fit = rows == 0 || size + more <= table.max_rows;
      fits = rows_fit &&
             (chosen == 0 || state.next_slot + max(int64_t{0}, more + guests - state.num_free) <= table.max_slots);
      if (kPolicies && need > 0 && fits && p.gate->is_shut != 1) {
        p.evictions[t].plan->need = need;
        p.evictions[t].plan->num_slots = state.next_slot;
      }
      if (!fits && rows_fit && guests > 0) {
        report(p.errors, Fault::kManyGuests, table.number, size, table.max_slots - size);
      } else if (!fits) {
        report(p.errors, Fault::kFull, table.number, size, min(table.max_rows, table.max_slots));
      }
    } else {
      fits = state.num_free + chosen <= table.max_free;
      if (!fits) report(p.errors, Fault::kFull, table.number, state.num_free, table.max_free);
    }
    if (!fits && p.gate->is_shut == 0) p.gate->is_shut = 2;
  }
}

template <bool kPolicies>
__global__ void __launch_bounds__(kThreads) insert_kernel(const __grid_constant__ Call p) {
  if (!p.is_any_chosen()) return;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool is_there = i < p.num_keys;
  const Item& item = p.item_of(is_there ? i : 0);
  const IndexView& own = p.tables[item.table];
  const bool is_shut = p.gate->is_shut != 0;
  const uint32_t cell = is_there && !is_shut ? p.cell_of[i] : kNone;
  bool is_chosen = false, is_guest = false;
  int64_t slot = -1, key = 0;
  if (cell != kNone) {
    const uint32_t first = p.cells[cell];
    const State state = *own.state;
    int64_t taken = p.chosen.of(first) - p.chosen.of(own.begin);  // slots that are free or new, before it
    int64_t guests = 0, evicted = -1;
    if constexpr (kPolicies) {
      const EvictionView& eviction = p.evictions[item.table];
      const int64_t more =
          eviction.plan != nullptr ? p.num_chosen(own) - p.num_guests(own) - eviction.plan->need : INT64_MAX;
      is_guest = p.is_guest(first);
      guests = p.guests.between(own.begin, first);
      const int64_t rows = taken - guests;
      taken = min(rows, more) + guests;
      if (!is_guest && rows >= more) evicted = rows - more;
      if (evicted >= 0) slot = eviction.slots[evicted];
    }
    if (evicted < 0) {
      slot = taken < state.num_free ? own.free_slots[state.num_free - 1 - taken]
                                    : state.next_slot + taken - state.num_free;
    }
    is_chosen = first == i;
    key = Call::key_of(item, i);
    if (is_guest && is_chosen) own.guests[state.num_guests + guests] = slot;
  }
  const uint32_t room = is_chosen && !is_guest ? p.rooms[i] : kNoRoom;
  bool is_placed = room != kNoRoom && place_in_room(own.space, key, slot, room);
  const bool waits = is_chosen && !is_guest && !is_placed;
  unsigned left = __ballot_sync(kWholeWarp, waits);
  while (left != 0) {
    const uint32_t table = __shfl_sync(kWholeWarp, item.table, __ffs(left) - 1);
    const bool now = waits && item.table == table;
    if (place_keys(p.tables[table].space, key, slot, now)) is_placed = true;
    left &= ~__ballot_sync(kWholeWarp, now);
  }
  if (!is_there) return;
  if (is_chosen && is_guest) is_placed = true;
  if (cell == kNone) return;
  const uint8_t is_new = is_placed ? 1 : !is_chosen && item.marks_repeats ? HashRequest::kRepeated : 0;
  if (is_new != 0 && item.is_new != nullptr) item.is_new[i - item.begin] = is_new;
  if (is_chosen && !is_placed) {
    p.cell_of[i] = kNone;  // nothing to take back
    p.gate->collides = 1;
    report(p.errors, Fault::kCollision, own.number, 0, kSegmentEntries);
    return;
  }
  item.slots[i - item.begin] = slot;
  if (!is_chosen) return;
  own.keys[slot] = key;
  if constexpr (kPolicies) {
    const EvictionView& eviction = p.evictions[item.table];
    if (eviction.scores != nullptr) eviction.scores[slot] = is_guest ? Eviction::kNoKey : eviction.uses.first();
  }
}

// Takes each thread's own key, if it has one, out of the index of its table.
__device__ __forceinline__ void take_out(const Call& p, uint32_t its_table, int64_t key, bool is_asked) {
  unsigned left = __ballot_sync(kWholeWarp, is_asked);
  while (left != 0) {
    const uint32_t table = __shfl_sync(kWholeWarp, its_table, __ffs(left) - 1);
    const bool now = is_asked && its_table == table;
    remove_keys(p.tables[table].space, key, now);
    left &= ~__ballot_sync(kWholeWarp, now);
  }
}

// Of a row that goes as number i - table.begin.
struct Evicted {
  const EvictionView* eviction;
  const IndexView* table;
  uint32_t number;  // of the table
  int64_t at;
};

// `taken`: whether what has been given up is asked for, or what is needed.
__device__ __forceinline__ bool find_evicted(const Call& p, int64_t i, bool taken, Evicted* found) {
  if (i >= p.num_keys) return false;
  found->number = p.item_of(i).table;
  found->table = &p.tables[found->number];
  found->eviction = &p.evictions[found->number];
  found->at = i - found->table->begin;
  const Plan* const plan = found->eviction->plan;
  return plan != nullptr && found->at < (taken ? plan->taken : plan->need);
}

// Whether a table of the call gives up rows.
__device__ __forceinline__ bool any_goes(const Call& p) {
  for (uint32_t t = 0; t < p.num_tables; ++t) {
    if (p.evictions[t].plan != nullptr && p.evictions[t].plan->need > 0) return true;
  }
  return false;
}

// Takes the keys of rows that go out of their indices.
__global__ void __launch_bounds__(kThreads) evict_kernel(const __grid_constant__ Call p) {
  if (p.gate->is_shut != 0 || !any_goes(p)) return;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads; first < p.num_keys;
       first += static_cast<int64_t>(gridDim.x) * kThreads) {
    Evicted row = {};
    const bool goes = find_evicted(p, first + threadIdx.x, false, &row);
    int64_t key = 0;
    if (goes) {
      key = row.table->keys[row.eviction->slots[row.at]];
      row.eviction->keys[row.at] = key;
    }
    take_out(p, row.number, key, goes);
  }
}

// After a call that failed: rows that went are back.
__global__ void __launch_bounds__(kThreads) restore_kernel(const __grid_constant__ Call p) {
  const Gate gate = *p.gate;
  if (gate.is_shut != 2 && gate.collides == 0) return;
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads; begin < p.num_keys;
       begin += static_cast<int64_t>(gridDim.x) * kThreads) {
    Evicted row = {};
    const bool went = find_evicted(p, begin + threadIdx.x, true, &row);
    int64_t slot = 0, key = 0;
    if (went) {
      slot = row.eviction->slots[row.at];
      row.eviction->scores[slot] = row.eviction->old_scores[row.at];
    }
    if (gate.collides == 0) continue;
    if (went) {
      key = row.eviction->keys[row.at];
      row.table->keys[slot] = key;
    }
    // There is room for it: what came in its place has gone.
    unsigned left = __ballot_sync(kWholeWarp, went);
    while (left != 0) {
      const uint32_t table = __shfl_sync(kWholeWarp, row.number, __ffs(left) - 1);
      const bool now = went && row.number == table;
      place_keys(p.tables[table].space, key, slot, now);
      left &= ~__ballot_sync(kWholeWarp, now);
    }
  }
}

__global__ void __launch_bounds__(kThreads) erase_kernel(const __grid_constant__ Call p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool is_shut = p.gate->is_shut != 0;
  const bool is_chosen = i < p.num_keys && !is_shut && p.is_chosen(i);
  const Item& item = p.item_of(i < p.num_keys ? i : 0);
  take_out(p, item.table, is_chosen ? Call::key_of(item, i) : 0, is_chosen);
  if (i >= p.num_keys) return;
  if (!is_chosen) {
    item.slots[i - item.begin] = -1;
    return;
  }
  const IndexView& table = p.tables[item.table];
  table.free_slots[table.state->num_free + p.chosen.of(i) - p.chosen.of(table.begin)] = item.slots[i - item.begin];
}

// What a call has made of a queue.
__device__ __forceinline__ void finish_eviction(const EvictionView& eviction, const Gate& gate, int64_t chosen) {
  Queue& queue = *eviction.queue;
  const bool fails = gate.is_shut == 2 || gate.collides != 0;
  if (fails && chosen > 0) {
    queue = {0, 0};  // where those that came back stood in it is not known
  } else if (gate.is_shut == 0 && eviction.plan != nullptr && eviction.plan->need > 0) {
    const Plan& plan = *eviction.plan;
    if (eviction.is_swept()) {
      queue = {0, plan.wanted - (plan.need - static_cast<int64_t>(plan.found))};
    } else {
      queue.head = plan.head;
    }
  }
}

// The new states, and the news of them; where a segment was full, takes back what was inserted.
template <Purpose kPurpose, bool kPolicies = false>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ Call p) {
  const Gate gate = *p.gate;
  if (kPurpose == Purpose::kInsert && gate.collides != 0) {
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads; first < p.num_keys;
         first += static_cast<int64_t>(gridDim.x) * kThreads) {
      const int64_t i = first + threadIdx.x;
      const bool is_chosen = i < p.num_keys && p.is_chosen(i);
      const Item& item = p.item_of(i < p.num_keys ? i : 0);
      const bool is_held = is_chosen && !(kPolicies && p.is_guest(i));
      take_out(p, item.table, is_held ? Call::key_of(item, i) : 0, is_held);
      if (!kPolicies || !is_chosen) continue;
      // Else rows that come back would have initial values.
      if (item.is_new != nullptr) item.is_new[i - item.begin] = 0;
      const EvictionView& eviction = p.evictions[item.table];
      if (eviction.scores != nullptr) eviction.scores[item.slots[i - item.begin]] = sok::Eviction::kNoKey;
    }
  }
  if (blockIdx.x != 0) return;
  for (uint32_t t = threadIdx.x; t < p.num_tables; t += kThreads) {
    const IndexView& table = p.tables[t];
    State state = *table.state;
    const int64_t chosen = p.num_chosen(table);
    if (gate.is_shut == 0 && gate.collides == 0) {
      if (kPurpose == Purpose::kInsert) {
        const int64_t guests = kPolicies ? p.num_guests(table) : 0, rows = chosen - guests;
        const int64_t evicted = num_evicted<kPolicies>(p, t, state.size() + rows);
        const int64_t reused = min(chosen - evicted, state.num_free);
        state.num_free -= reused;
        state.next_slot += chosen - evicted - reused;
        state.num_insertions += rows;
        if (kPolicies) {
          state.num_evictions += evicted;
          state.num_guests += guests;
          state.num_guests_ever += guests;
        }
      } else {
        state.num_free += chosen;
        if (table.expires) state.num_expirations += chosen;
      }
      *table.state = state;
    }
    if (kPolicies && p.evictions[t].scores != nullptr) finish_eviction(p.evictions[t], gate, chosen);
    volatile News* const news = table.news;
    news->state.next_slot = state.next_slot;
    news->state.num_free = state.num_free;
    news->state.num_insertions = state.num_insertions;
    news->state.num_evictions = state.num_evictions;
    if (kPurpose == Purpose::kErase) news->state.num_expirations = state.num_expirations;
    if (kPolicies) news->state.num_guests_ever = state.num_guests_ever;
    __threadfence_system();
    news->inserted = table.inserted;
    news->erased = table.erased;
  }
}

}  // namespace
}  // namespace sok::cuda

#endif  // SOK_CUDA_HASH_KERNELS_CUH_
