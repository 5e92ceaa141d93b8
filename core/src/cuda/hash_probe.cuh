// SPDX-License-Identifier: Apache-2.0
// Keys in the buckets of a hash index, on the device. Eight threads side by side, a tile, read a bucket, an entry each.
// Of each key that a tile looks for, one of its threads knows the path. All 32 threads of a warp call these functions
// together; tiles that have nothing to do any more go along.
#ifndef SOK_CUDA_HASH_PROBE_CUH_
#define SOK_CUDA_HASH_PROBE_CUH_

#include "cuda/launch.h"
#include "table/hash_layout.h"

namespace sok::cuda {

constexpr int kTile = HashBucket::kEntries;

// Of what __ballot_sync gave: this tile's eight bits.
__device__ __forceinline__ unsigned tile_bits(unsigned warp_bits) {
  return (warp_bits >> (threadIdx.x & (kWarp - kTile))) & ((1u << kTile) - 1u);
}

// A value that thread `from` of the tile has.
template <typename T>
__device__ __forceinline__ T from_tile(T value, int from) {
  return __shfl_sync(kWholeWarp, value, from, kTile);
}
__device__ __forceinline__ HashPath from_tile(const HashPath& path, int from) {
  HashPath result;
  result.segment = reinterpret_cast<HashBucket*>(from_tile(reinterpret_cast<unsigned long long>(path.segment), from));
  result.first = from_tile(path.first, from);
  result.second = from_tile(path.second, from);
  result.key_class = from_tile(path.key_class, from);
  return result;
}

__device__ __forceinline__ HashEntry load_entry(const HashEntry* entry) {
  const longlong2 both = *reinterpret_cast<const longlong2*>(entry);
  return {both.x, static_cast<uint64_t>(both.y)};
}
__device__ __forceinline__ unsigned long long* word_at(HashEntry* entry) {
  return reinterpret_cast<unsigned long long*>(&entry->word);
}

// The next bucket of a path is wanted soon, by all eight threads.
__device__ __forceinline__ void prefetch(const HashBucket* bucket) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(bucket));
}

struct Probe {
  bool is_found;
  bool goes_on;  // it may be in the next bucket of the path
  int at;        // the thread that has its entry
};

// What a bucket, of which each thread has its entry, says of a key.
__device__ __forceinline__ Probe probe(const HashEntry& entry, int64_t key, uint32_t key_class) {
  const unsigned found = tile_bits(__ballot_sync(kWholeWarp, entry.key == key && HashEntry::is_used(entry.word)));
  const unsigned passed = tile_bits(__ballot_sync(kWholeWarp, HashEntry::is_passed(entry.word)));
  return {found != 0, found == 0 && ((passed >> key_class) & 1u) != 0, __ffs(found) - 1};
}

// An empty entry of the first bucket of a key, and the passes in it, or kNoRoom. Keys of a bucket are given different
// ones, as far as there are some.
constexpr uint32_t kNoRoom = UINT32_MAX;

__device__ __forceinline__ uint32_t room_in(const HashEntry& entry, uint32_t key_class) {
  const unsigned empty = tile_bits(__ballot_sync(kWholeWarp, !HashEntry::is_used(entry.word)));
  const unsigned turned = (empty >> key_class | empty << (kTile - key_class)) & ((1u << kTile) - 1u);
  const uint32_t at = (__ffs(turned) - 1 + key_class) % kTile;
  const uint32_t passes = static_cast<uint32_t>((entry.word & HashEntry::kPasses) >> HashEntry::kPassShift);
  const uint32_t room = from_tile(passes, static_cast<int>(at)) * kTile + at;
  return empty != 0 ? room : kNoRoom;
}

// Each thread's own key: its slot, -1 where the index does not hold it; -1 too where it has none (!is_asked). Eight
// keys a tile, the first buckets of four of them on their way at once. With `room` also room_in its first bucket.
template <bool kWantsRoom = false>
__device__ __forceinline__ int64_t find_slots(const HashSpace& space, int64_t key, bool is_asked,
                                              uint32_t* room = nullptr) {
  constexpr int kAtOnce = 4;
  const int lane = threadIdx.x % kTile;
  const HashPath path = space.path_of(key);
  const unsigned asked = tile_bits(__ballot_sync(kWholeWarp, is_asked));
  int64_t slot = -1;
  bool goes_on = false;
#pragma unroll
  for (int first = 0; first < kTile; first += kAtOnce) {
    HashEntry entries[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const HashBucket* const bucket =
          reinterpret_cast<const HashBucket*>(from_tile(reinterpret_cast<unsigned long long>(path[0]), first + i));
      entries[i] = {0, 0};
      if (((asked >> (first + i)) & 1u) != 0) entries[i] = load_entry(&bucket->entries[lane]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int owner = first + i;
      const Probe result = probe(entries[i], from_tile(key, owner), from_tile(path.key_class, owner));
      const uint64_t word = from_tile(entries[i].word, result.at & (kTile - 1));
      uint32_t its_room = kNoRoom;
      if constexpr (kWantsRoom) its_room = room_in(entries[i], from_tile(path.key_class, owner));
      if (lane != owner) continue;
      if (result.is_found) slot = HashEntry::slot_of(word);
      goes_on = result.goes_on;
      if constexpr (kWantsRoom) *room = its_room;
    }
  }
  uint32_t step = 1;
  for (;;) {
    const unsigned waiting = __ballot_sync(kWholeWarp, goes_on);
    if (waiting == 0) break;
    const unsigned mine = tile_bits(waiting);
    const int owner = mine != 0 ? __ffs(mine) - 1 : 0;
    const HashPath its_path = from_tile(path, owner);
    const uint32_t its_step = from_tile(step, owner);
    HashEntry entry = {0, 0};
    if (mine != 0) entry = load_entry(&its_path[its_step]->entries[lane]);
    const Probe result = probe(entry, from_tile(key, owner), its_path.key_class);
    const uint64_t word = from_tile(entry.word, result.at & (kTile - 1));
    if (lane == owner && mine != 0) {
      if (result.is_found) slot = HashEntry::slot_of(word);
      goes_on = result.goes_on && ++step < HashPath::kLength;
    }
  }
  return slot;
}

// Puts a key, which the index does not hold and no other thread puts there, at `slot`, where its first bucket had room.
// False: another key was faster.
__device__ __forceinline__ bool place_in_room(const HashSpace& space, int64_t key, int64_t slot, uint32_t room) {
  HashEntry* const entry = &space.path_of(key)[0]->entries[room % kTile];
  const uint64_t word = static_cast<uint64_t>(room / kTile) << HashEntry::kPassShift;
  if (atomicCAS(word_at(entry), word, HashEntry::word_of(word, slot)) != word) return false;
  entry->key = key;
  return true;
}

// The same, where room was not looked for: in any entry of its first bucket that is empty and has no passes. False:
// there is none.
__device__ __forceinline__ bool place_in_first(const HashSpace& space, int64_t key, int64_t slot) {
  const HashPath path = space.path_of(key);
  for (uint32_t i = 0; i < kTile; ++i) {
    HashEntry* const entry = &path[0]->entries[(path.key_class + i) % kTile];
    if (*reinterpret_cast<volatile unsigned long long*>(word_at(entry)) != 0) continue;
    if (atomicCAS(word_at(entry), 0, HashEntry::word_of(0, slot)) != 0) continue;
    entry->key = key;
    return true;
  }
  return false;
}

// Puts each thread's own key, which the index does not hold and no other thread puts there, at `slot`. Returns whether
// it is there: it is not where its segment is full, and where it has none (!is_asked).
__device__ __forceinline__ bool place_keys(const HashSpace& space, int64_t key, int64_t slot, bool is_asked) {
  const int lane = threadIdx.x % kTile;
  const HashPath path = space.path_of(key);
  if (is_asked) prefetch(path[0]);
  bool is_placed = false, waits = is_asked;
  for (;;) {
    const unsigned waiting = __ballot_sync(kWholeWarp, waits);
    if (waiting == 0) return is_placed;
    const unsigned mine = tile_bits(waiting);
    const int owner = mine != 0 ? __ffs(mine) - 1 : 0;
    const HashPath its_path = from_tile(path, owner);
    const int64_t its_key = from_tile(key, owner), its_slot = from_tile(slot, owner);
    // One key of each tile, to its end.
    bool works = mine != 0, success = false;
    uint32_t step = 0;
    while (__any_sync(kWholeWarp, works)) {
      HashEntry* const entry = &its_path[step]->entries[lane];
      uint64_t word = HashEntry::kUsed;
      if (works) word = *reinterpret_cast<volatile unsigned long long*>(word_at(entry));
      unsigned empty = tile_bits(__ballot_sync(kWholeWarp, !HashEntry::is_used(word)));
      if (!works) empty = 0;
      bool took = false;
      if (empty != 0 && lane == __ffs(empty) - 1) {
        took = atomicCAS(word_at(entry), word, HashEntry::word_of(word, its_slot)) == word;
        if (took) entry->key = its_key;
      }
      const unsigned taken = tile_bits(__ballot_sync(kWholeWarp, took));
      if (!works) continue;
      if (taken != 0) {
        works = false;
        success = true;
      } else if (empty == 0) {  // else another key was faster, and the bucket is looked at again
        if (lane == static_cast<int>(its_path.key_class)) atomicAdd(word_at(entry), HashEntry::kOnePass);
        works = ++step < HashPath::kLength;
      }
    }
    if (mine != 0 && !success && lane == static_cast<int>(its_path.key_class)) {
      for (uint32_t i = 0; i < step; ++i) atomicAdd(word_at(&its_path[i]->entries[lane]), -HashEntry::kOnePass);
    }
    if (mine != 0 && lane == owner) {
      is_placed = success;
      waits = false;
    }
  }
}

// Takes away each thread's own key, which the index holds and no other thread takes away.
__device__ __forceinline__ void remove_keys(const HashSpace& space, int64_t key, bool is_asked) {
  const int lane = threadIdx.x % kTile;
  const HashPath path = space.path_of(key);
  if (is_asked) prefetch(path[0]);
  bool waits = is_asked;
  for (;;) {
    const unsigned waiting = __ballot_sync(kWholeWarp, waits);
    if (waiting == 0) return;
    const unsigned mine = tile_bits(waiting);
    const int owner = mine != 0 ? __ffs(mine) - 1 : 0;
    const HashPath its_path = from_tile(path, owner);
    const int64_t its_key = from_tile(key, owner);
    bool works = mine != 0;
    uint32_t step = 0;
    while (__any_sync(kWholeWarp, works)) {
      HashEntry* const entry = &its_path[step]->entries[lane];
      HashEntry seen = {0, 0};
      if (works) {
        seen.key = entry->key;
        seen.word = *reinterpret_cast<volatile unsigned long long*>(word_at(entry));
      }
      const bool is_it = works && seen.key == its_key && HashEntry::is_used(seen.word);
      if (is_it) atomicAnd(word_at(entry), HashEntry::kPasses);
      const unsigned found = tile_bits(__ballot_sync(kWholeWarp, is_it));
      if (!works) continue;
      if (found != 0) {
        works = false;
      } else {
        if (lane == static_cast<int>(its_path.key_class)) atomicAdd(word_at(entry), -HashEntry::kOnePass);
        works = ++step < HashPath::kLength;
      }
    }
    if (mine != 0 && lane == owner) waits = false;
  }
}

}  // namespace sok::cuda

#endif  // SOK_CUDA_HASH_PROBE_CUH_
