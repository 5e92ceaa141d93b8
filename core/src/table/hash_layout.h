// SPDX-License-Identifier: Apache-2.0
// How a hash index lies in memory, the same on every backend: entries, buckets, segments, and where a key may be. Why
// it is so: docs/DYNAMIC_TABLES.md.
#ifndef SOK_TABLE_HASH_LAYOUT_H_
#define SOK_TABLE_HASH_LAYOUT_H_

#include <cstdint>

#include "common/host_device.h"

namespace sok {

// Memory of zeros is an index without keys.
struct HashEntry {
  static constexpr uint64_t kUsed = uint64_t{1} << 63;
  static constexpr int kPassShift = 40;
  static constexpr uint64_t kOnePass = uint64_t{1} << kPassShift;
  static constexpr uint64_t kPasses = uint64_t{0xffff} << kPassShift;
  static constexpr uint64_t kSlot = kOnePass - 1;

  int64_t key;
  // kUsed, the slot, and passes: in entry c of a bucket, how many keys of class c have gone on to the next bucket of
  // their path because this one was full, and are there. A segment has 4096 keys at most, so they do not overflow. What
  // is neither is 0.
  uint64_t word;

  SOK_HOST_DEVICE static bool is_used(uint64_t word) { return (word & kUsed) != 0; }
  SOK_HOST_DEVICE static bool is_passed(uint64_t word) { return (word & kPasses) != 0; }
  SOK_HOST_DEVICE static int64_t slot_of(uint64_t word) { return static_cast<int64_t>(word & kSlot); }
  // Of a key in an entry whose word was `word`.
  SOK_HOST_DEVICE static uint64_t word_of(uint64_t word, int64_t slot) {
    return (word & kPasses) | kUsed | static_cast<uint64_t>(slot);
  }
};

// One access of a GPU.
struct alignas(128) HashBucket {
  static constexpr int kEntries = 8;
  HashEntry entries[kEntries];
};
static_assert(sizeof(HashBucket) == 128);

constexpr int64_t kMaxHashRows = int64_t{1} << 40;

// A segment is a hash table of its own: a key is in the one that the upper bits of its hash name.
constexpr uint32_t kSegmentBuckets = 512;
constexpr int64_t kSegmentEntries = int64_t{kSegmentBuckets} * HashBucket::kEntries;
constexpr int64_t kSegmentBytes = int64_t{kSegmentBuckets} * sizeof(HashBucket);

// One to one, so that keys never have the same hash.
SOK_HOST_DEVICE inline uint64_t hash_of(int64_t key) {
  uint64_t h = static_cast<uint64_t>(key) + 0x9e3779b97f4a7c15u;
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
  return h ^ (h >> 31);
}

// floor(a * b / 2^64)
SOK_HOST_DEVICE inline uint64_t multiply_high(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// The buckets that a key may be in, in the order in which it tries them: one by its hash, a second one, and from there
// on all of the segment in growing steps. A key is in none of those after one that no key of its class has passed.
struct HashPath {
  static constexpr uint32_t kLength = kSegmentBuckets + 1;

  HashBucket* segment;
  uint32_t first, second;
  uint32_t key_class;  // below HashBucket::kEntries

  SOK_HOST_DEVICE HashBucket* operator[](uint32_t i) const {
    return segment + (i == 0 ? first : (second + i * (i - 1) / 2) % kSegmentBuckets);
  }
};

// Which segment a hash is in. While the index grows, hashes from `boundary` on are spread over more segments already.
struct HashSpace {
  HashBucket* buckets;
  uint64_t segments;
  uint64_t wider_segments;
  uint64_t boundary;

  SOK_HOST_DEVICE HashPath path_of(int64_t key) const {
    const uint64_t hash = hash_of(key);
    const uint64_t segment = multiply_high(hash, hash >= boundary ? wider_segments : segments);
    const uint32_t first = static_cast<uint32_t>(hash % kSegmentBuckets);
    const uint32_t apart = static_cast<uint32_t>(hash / kSegmentBuckets % kSegmentBuckets);
    const uint32_t key_class = static_cast<uint32_t>(hash / kSegmentBuckets / kSegmentBuckets % HashBucket::kEntries);
    return {buckets + segment * kSegmentBuckets, first, first ^ (apart == 0 ? 1 : apart), key_class};
  }
};

}  // namespace sok

#endif  // SOK_TABLE_HASH_LAYOUT_H_
