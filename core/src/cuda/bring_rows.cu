// SPDX-License-Identifier: Apache-2.0
// Rows that a call asks for come from the host's memory to the device's (table/tiers.h), for all tables of a call by
// one cooperative launch, which ends early where none has to: how many there are, the device alone knows. Each changes
// places with one of the rows that would be given up first. The rows that come are taken in the order of their slots,
// and so are those that go, so the same calls leave every row at the same place.
#include <cooperative_groups.h>

#include <cub/block/block_scan.cuh>

#include "cuda/hash_probe.cuh"
#include "cuda/layout.h"
#include "cuda/runtime.h"
#include "cuda/sweep.cuh"
#include "cuda/tiers.h"
#include "cuda/upload.h"

namespace sok::cuda {
namespace {

constexpr int kBlocksOfMultiprocessor = 4;
// Of a multiprocessor, where a step runs too. As fast, since PCIe is what it waits for.
constexpr int kBlocksBeside = 1;
constexpr int64_t kWordsOfThread = 8;
constexpr int64_t kWordChunk = kWordsOfThread * kThreads;

struct TierView {
  HashSpace space;
  int64_t* keys;
  int32_t* since;
  int32_t generation;
  bool has_guests;
  int64_t device_rows;
  const int64_t* next_slot;
  uint2* bits;  // of 32 slots, from device_rows on: x: wanted, y: used by the running step
  int64_t num_words;
  uint32_t* sums;  // of chunks of them
  int64_t* from;   // slots of the rows that come, ascending
  int64_t* to;     // and those that they get; -1: it stays
  const TierRequest::Column* columns;
  int32_t num_columns;
  unsigned long long *device_hits, *host_hits;  // of this call, on the device
  TierCounts* counts;
};

struct Item {
  int64_t* slots;
  int64_t size;
  uint32_t table;
};

struct Call {
  const TierView* tiers;
  const EvictionView* views;
  const Sweep* sweeps;
  const Item* items;
  uint32_t num_tables, num_items;
  int32_t most_key_bits;
  bool is_ahead;
};

__device__ __forceinline__ int64_t thread_of(uint32_t block) {
  return static_cast<int64_t>(block) * kThreads + threadIdx.x;
}
__device__ __forceinline__ int64_t threads_of_grid() { return static_cast<int64_t>(gridDim.x) * kThreads; }

// Marks the wanted rows among those of an item.
__device__ __forceinline__ void want(const Call& p, const Item& item, uint32_t block) {
  const TierView& tier = p.tiers[item.table];
  const EvictionView& view = p.views[item.table];
  const int64_t end = tier.device_rows + 32 * tier.num_words;
  uint32_t device_hits = 0, host_hits = 0;
  for (int64_t i = thread_of(block); i < item.size; i += threads_of_grid()) {
    const int64_t slot = item.slots[i];
    if (slot < 0 || slot >= max(end, tier.device_rows)) continue;
    if (p.is_ahead || tier.has_guests) {
      const int64_t score = *static_cast<volatile int64_t*>(&view.scores[slot]);
      if (score == Eviction::kNoKey) continue;  // a guest's
      if (p.is_ahead && Uses::last_use_of(score) != view.uses.generation) {
        *static_cast<volatile int64_t*>(&view.scores[slot]) =
            Uses::score_of(Uses::rank_of(score), view.uses.generation);
      }
    }
    if (slot < tier.device_rows) {
      ++device_hits;
      continue;
    }
    ++host_hits;
    const int64_t bit = slot - tier.device_rows;
    volatile uint2* const word = &tier.bits[bit / 32];
    const uint32_t mask = 1u << (bit % 32);
    if (((word->x | word->y) & mask) == 0) atomicOr(&tier.bits[bit / 32].x, mask);
  }
  device_hits = __reduce_add_sync(kWholeWarp, device_hits);
  host_hits = __reduce_add_sync(kWholeWarp, host_hits);
  if (threadIdx.x % kWarp != 0) return;
  if (device_hits > 0) atomicAdd(tier.device_hits, static_cast<unsigned long long>(device_hits));
  if (host_hits > 0) atomicAdd(tier.host_hits, static_cast<unsigned long long>(host_hits));
}

// Counts the wanted rows of each chunk of words, or lists them and takes their marks away.
template <bool kWrites>
__device__ __forceinline__ void list(const TierView& tier, uint32_t block) {
  using Scan = cub::BlockScan<uint32_t, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  const int64_t chunks = (tier.num_words + kWordChunk - 1) / kWordChunk;
  for (int64_t chunk = block; chunk < chunks; chunk += gridDim.x) {
    const int64_t first = chunk * kWordChunk + threadIdx.x * kWordsOfThread;
    uint32_t words[kWordsOfThread], count = 0, before = 0, sum = 0;
#pragma unroll
    for (int k = 0; k < kWordsOfThread; ++k) {
      words[k] = first + k < tier.num_words ? tier.bits[first + k].x : 0;
      count += __popc(words[k]);
    }
    Scan(storage).ExclusiveSum(count, before, sum);
    __syncthreads();
    if (!kWrites) {
      if (threadIdx.x == 0) tier.sums[chunk] = sum;
      continue;
    }
    int64_t at = int64_t{tier.sums[chunk]} + before;
#pragma unroll
    for (int k = 0; k < kWordsOfThread; ++k) {
      if (words[k] == 0) continue;
      tier.bits[first + k].x = 0;
      for (uint32_t left = words[k]; left != 0; left &= left - 1) {
        tier.from[at++] = tier.device_rows + 32 * (first + k) + __ffs(left) - 1;
      }
    }
  }
}

// By one thread; nullptr: the index does not hold it.
__device__ __forceinline__ HashEntry* entry_of(const HashSpace& space, int64_t key) {
  const HashPath path = space.path_of(key);
  for (uint32_t step = 0; step < HashPath::kLength; ++step) {
    HashBucket* const bucket = path[step];
    bool goes_on = false;
    for (uint32_t i = 0; i < kTile; ++i) {
      const HashEntry entry = load_entry(&bucket->entries[i]);
      if (entry.key == key && HashEntry::is_used(entry.word)) return &bucket->entries[i];
      if (i == path.key_class) goes_on = HashEntry::is_passed(entry.word);
    }
    if (!goes_on) break;
  }
  return nullptr;
}

// The keys of two slots change places. False, with nothing changed: one is nobody's.
__device__ __forceinline__ bool exchange_keys(const TierView& tier, const EvictionView& view, int64_t a, int64_t b) {
  const int64_t key_a = tier.keys[a], key_b = tier.keys[b];
  HashEntry* const entry_a = entry_of(tier.space, key_a);
  HashEntry* const entry_b = entry_of(tier.space, key_b);
  if (entry_a == nullptr || HashEntry::slot_of(entry_a->word) != a) return false;
  if (entry_b == nullptr || HashEntry::slot_of(entry_b->word) != b) return false;
  entry_a->word = HashEntry::word_of(entry_a->word, b);
  entry_b->word = HashEntry::word_of(entry_b->word, a);
  tier.keys[a] = key_b;
  tier.keys[b] = key_a;
  const int64_t score = view.scores[a];
  view.scores[a] = view.scores[b];
  view.scores[b] = score;
  tier.since[a] = tier.generation;
  tier.since[b] = tier.generation;
  return true;
}

template <typename Word>
__device__ __forceinline__ void exchange(char* data, int64_t bytes, int64_t a, int64_t b, int lane) {
  const int64_t words = bytes / int64_t{sizeof(Word)};
  Word* const at_a = reinterpret_cast<Word*>(data) + a * words;
  Word* const at_b = reinterpret_cast<Word*>(data) + b * words;
  for (int64_t i = lane; i < words; i += kWarp) {
    const Word word = at_a[i];
    at_a[i] = at_b[i];
    at_b[i] = word;
  }
}

// By a warp.
__device__ __forceinline__ void exchange_rows(const TierView& tier, int64_t a, int64_t b, int lane) {
  for (int32_t c = 0; c < tier.num_columns; ++c) {
    const TierRequest::Column& column = tier.columns[c];
    if (column.bytes % 16 == 0) {
      exchange<uint4>(column.data, column.bytes, a, b, lane);
    } else if (column.bytes % 4 == 0) {
      exchange<uint32_t>(column.data, column.bytes, a, b, lane);
    } else {
      exchange<uint16_t>(column.data, column.bytes, a, b, lane);
    }
  }
}

// The place of a number among ascending ones, or -1.
template <typename T>
__device__ __forceinline__ int64_t place_of(const T* numbers, int64_t begin, int64_t end, int64_t wanted) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    const auto here = static_cast<int64_t>(numbers[middle]);
    if (here == wanted) return middle;
    if (here < wanted) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return -1;
}

// Candidates for eviction whose rows went to the host's memory are found there.
__device__ __forceinline__ void mend_queue(const TierView& tier, const EvictionView& view, const Sweep& sweep,
                                           uint32_t block) {
  const Plan& plan = *view.plan;
  for (int64_t i = view.queue->head + thread_of(block); i < view.queue->end; i += threads_of_grid()) {
    const int64_t slot = view.candidates[i].slot;
    if (slot >= tier.device_rows) continue;
    int64_t at = place_of(sweep.slots[0], 0, plan.below, slot);
    if (at < 0) at = place_of(sweep.slots[0], plan.below, plan.wanted, slot);
    if (at >= 0 && tier.to[at] >= 0) view.candidates[i].slot = tier.from[at];
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksOfMultiprocessor) bring_kernel(const __grid_constant__ Call p) {
  const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  const auto for_all = [&](const auto& work) {
    for (uint32_t t = 0; t < p.num_tables; ++t) {
      if (p.views[t].plan->need > 0) work(p.tiers[t], p.views[t], p.sweeps[t], block_for(t, p.num_tables));
    }
  };
  const auto for_own = [&](const auto& work) {
    for (uint32_t t = blockIdx.x; t < p.num_tables; t += gridDim.x) {
      if (p.views[t].plan->need > 0) work(p.tiers[t], p.views[t], p.sweeps[t]);
    }
  };
  for (uint32_t i = 0; i < p.num_items; ++i) want(p, p.items[i], block_for(i, p.num_items));
  grid.sync();
  for (uint32_t t = 0; t < p.num_tables; ++t) list<false>(p.tiers[t], block_for(t, p.num_tables));
  grid.sync();
  for (uint32_t t = blockIdx.x; t < p.num_tables; t += gridDim.x) {
    const TierView& tier = p.tiers[t];
    Plan& plan = *p.views[t].plan;
    const uint32_t count = add_up(tier.sums, (tier.num_words + kWordChunk - 1) / kWordChunk);
    for (int digit = threadIdx.x; digit < kDigits; digit += kThreads) p.sweeps[t].counts[digit] = 0;
    if (threadIdx.x != 0) continue;
    plan.need = count;
    plan.num_slots = min(*tier.next_slot, tier.device_rows);
    volatile TierCounts* const counts = tier.counts;
    if (p.is_ahead) continue;  // the step that is to come counts them
    counts->device_hits = counts->device_hits + static_cast<int64_t>(*tier.device_hits);
    counts->host_hits = counts->host_hits + static_cast<int64_t>(*tier.host_hits);
  }
  grid.sync();
  bool is_over = true;
  for (uint32_t t = 0; t < p.num_tables; ++t) is_over = is_over && p.views[t].plan->need == 0;
  if (is_over) return;

  // Which rows come, and which go for them.
  for_all([](const TierView& tier, const EvictionView&, const Sweep&, uint32_t block) { list<true>(tier, block); });
  for (int done = 0; done < p.most_key_bits; done += kDigitBits) {
    const auto width_of = [&](const EvictionView& view) { return min(kDigitBits, view.key_bits - done); };
    for_all([&](const TierView&, const EvictionView& view, const Sweep& sweep, uint32_t block) {
      if (done < view.key_bits) count_digits(view, sweep, view.key_bits - done - width_of(view), width_of(view), block);
    });
    grid.sync();
    for_own([&](const TierView&, const EvictionView& view, const Sweep& sweep) {
      if (done >= view.key_bits) return;
      pick(view, sweep, view.key_bits - done - width_of(view), width_of(view), nullptr, nullptr);
    });
    grid.sync();
  }
  for_all([](const TierView&, const EvictionView& view, const Sweep& sweep, uint32_t block) {
    select<false>(view, sweep, block);
  });
  grid.sync();
  for_own([](const TierView&, const EvictionView&, const Sweep& sweep) {
    add_up(sweep.sums, sweep.num_chunks);
    add_up(sweep.sums + sweep.num_chunks, sweep.num_chunks);
  });
  grid.sync();
  for_all([](const TierView&, const EvictionView& view, const Sweep& sweep, uint32_t block) {
    select<true>(view, sweep, block);
  });
  grid.sync();

  for_all([&](const TierView& tier, const EvictionView& view, const Sweep& sweep, uint32_t block) {
    for (int64_t i = thread_of(block); i < view.plan->need; i += threads_of_grid()) {
      const int64_t from = tier.from[i];
      const int64_t to = i < view.plan->wanted ? int64_t{sweep.slots[0][i]} : -1;
      const bool comes = to >= 0 && exchange_keys(tier, view, from, to);
      tier.to[i] = comes ? to : -1;
      if (comes || p.is_ahead) continue;
      const int64_t bit = from - tier.device_rows;
      atomicOr(&tier.bits[bit / 32].y, 1u << (bit % 32));
    }
  });
  grid.sync();
  for_all([](const TierView& tier, const EvictionView& view, const Sweep& sweep, uint32_t block) {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const int64_t count = view.plan->wanted;
    for (int64_t i = thread_of(block) / kWarp; i < count; i += threads_of_grid() / kWarp) {
      const int64_t to = tier.to[i];
      if (to >= 0) exchange_rows(tier, tier.from[i], to, lane);
    }
    if (view.uses.strategy != SOK_EVICT_NOTHING) mend_queue(tier, view, sweep, block);
  });
  for (uint32_t i = 0; i < p.num_items; ++i) {
    const Item& item = p.items[i];
    const TierView& tier = p.tiers[item.table];
    const int64_t count = p.views[item.table].plan->wanted;
    if (p.is_ahead || p.views[item.table].plan->need == 0) continue;
    for (int64_t k = thread_of(block_for(i, p.num_items)); k < item.size; k += threads_of_grid()) {
      const int64_t slot = item.slots[k];
      if (slot < tier.device_rows) continue;
      const int64_t at = place_of(tier.from, 0, count, slot);
      if (at >= 0 && tier.to[at] >= 0) item.slots[k] = tier.to[at];
    }
  }
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  for_all([](const TierView& tier, const EvictionView& view, const Sweep&, uint32_t) {
    volatile TierCounts* const counts = tier.counts;
    counts->moves = counts->moves + view.plan->wanted;
  });
}

// Gives the arrays of a table their places in `memory`, and returns how many bytes they take.
int64_t lay_out(TierView& tier, Sweep& sweep, int64_t num_keys, int64_t num_slots, char* memory) {
  Layout layout(memory);
  const int64_t most = std::min(num_keys, 32 * tier.num_words);
  sweep.num_chunks = ceil_div(std::min(num_slots, tier.device_rows), kSlotChunk);
  layout.place(tier.sums, ceil_div(tier.num_words, kWordChunk));
  layout.place(tier.from, most);
  layout.place(tier.to, most);
  layout.place(sweep.counts, kDigits);
  layout.place(sweep.sums, 2 * sweep.num_chunks);
  layout.place(sweep.keys[0], most);
  layout.place(sweep.slots[0], most);
  return layout.bytes();
}

}  // namespace

void bring_rows(const sok_context& context, const std::vector<TierRequest>& requests, bool is_ahead) {
  const Scope scope(context);
  const size_t num_tables = requests.size();
  std::vector<TierView> tiers(num_tables);
  std::vector<EvictionView> views(num_tables);
  std::vector<Sweep> sweeps(num_tables);
  std::vector<Item> items;
  std::vector<TierRequest::Column> columns;
  std::vector<Buffer<char>> memory;
  // Zeros: a plan and two counts of hits of each table.
  constexpr int64_t kPlanBytes = (sizeof(Plan) + 15) / 16 * 16, kZeroBytes = kPlanBytes + 2 * sizeof(int64_t);
  const Buffer<char> zeros(scope.context(), static_cast<int64_t>(num_tables) * kZeroBytes);
  SOK_CUDA_CHECK(cudaMemsetAsync(zeros.data(), 0, static_cast<size_t>(zeros.size()), scope.stream()));
  int32_t most_key_bits = 0;
  for (size_t t = 0; t < num_tables; ++t) {
    const TierRequest& request = requests[t];
    auto& own = static_cast<Tiers&>(*request.tiers);
    const int64_t num_slots = request.index->num_slots();
    int64_t num_keys = 0;
    for (const TierRequest::Slots& each : request.slots) {
      items.push_back({each.slots, each.size, static_cast<uint32_t>(t)});
      num_keys += each.size;
    }
    TierView& tier = tiers[t];
    tier.space = request.index->space();
    tier.keys = request.index->keys();
    tier.since = request.since;
    tier.generation = request.generation;
    tier.has_guests = request.index->most_slots() > request.index->capacity();
    tier.device_rows = own.device_rows();
    tier.next_slot = request.index->next_slot();
    tier.bits = reinterpret_cast<uint2*>(own.bits(scope.stream(), request.eviction->step()));
    tier.num_words = ceil_div(std::max<int64_t>(0, num_slots - own.device_rows()), 32);
    tier.num_columns = static_cast<int32_t>(request.columns.size());
    tier.counts = own.counts();
    columns.insert(columns.end(), request.columns.begin(), request.columns.end());
    memory.emplace_back(scope.context(), lay_out(tier, sweeps[t], num_keys, num_slots, nullptr));
    lay_out(tier, sweeps[t], num_keys, num_slots, memory.back().data());
    char* const zero = zeros.data() + static_cast<int64_t>(t) * kZeroBytes;
    tier.device_hits = reinterpret_cast<unsigned long long*>(zero + kPlanBytes);
    tier.host_hits = tier.device_hits + 1;
    views[t] = static_cast<Eviction&>(*request.eviction).view(num_keys, false);
    views[t].keeps_step = true;
    views[t].share = 1;
    views[t].plan = reinterpret_cast<Plan*>(zero);
    most_key_bits = std::max(most_key_bits, views[t].key_bits);
  }
  Upload column_upload, upload;  // the columns are where the views say
  const size_t column_place = column_upload.add(columns);
  column_upload.send(scope);
  const TierRequest::Column* next = column_upload.at<TierRequest::Column>(column_place);
  for (TierView& tier : tiers) {
    tier.columns = next;
    next += tier.num_columns;
  }
  const size_t tier_place = upload.add(tiers), view_place = upload.add(views), sweep_place = upload.add(sweeps);
  const size_t item_place = upload.add(items);
  upload.send(scope);
  Call call = {upload.at<TierView>(tier_place),
               upload.at<EvictionView>(view_place),
               upload.at<Sweep>(sweep_place),
               upload.at<Item>(item_place),
               static_cast<uint32_t>(num_tables),
               static_cast<uint32_t>(items.size()),
               most_key_bits,
               is_ahead};
  void* arguments[] = {&call};
  const int64_t blocks = int64_t{is_ahead ? kBlocksBeside : kBlocksOfMultiprocessor} * num_multiprocessors();
  SOK_CUDA_CHECK(
      cudaLaunchCooperativeKernel(bring_kernel, dim3(grid_of(blocks)), dim3(kThreads), arguments, 0, scope.stream()));
}

}  // namespace sok::cuda
