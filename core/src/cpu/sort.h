// SPDX-License-Identifier: Apache-2.0
// Stable radix sorts of (key, payload) entries by key.
#ifndef SOK_CPU_SORT_H_
#define SOK_CPU_SORT_H_

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>

#include "common/memory.h"
#include "common/parallel.h"

namespace sok::cpu {

// Keys below 2^32 share a word with the payload.
struct NarrowEntry {
  uint64_t word;
  static NarrowEntry make(uint64_t key, uint32_t payload) { return {key << 32 | payload}; }
  uint64_t key() const { return word >> 32; }
  uint32_t payload() const { return static_cast<uint32_t>(word); }
  uint32_t digit(int shift, uint32_t mask) const { return static_cast<uint32_t>(word >> (32 + shift)) & mask; }
};

struct WideEntry {
  uint64_t value;
  uint64_t number;
  static WideEntry make(uint64_t key, uint32_t payload) { return {key, payload}; }
  uint64_t key() const { return value; }
  uint32_t payload() const { return static_cast<uint32_t>(number); }
  uint32_t digit(int shift, uint32_t mask) const { return static_cast<uint32_t>(value >> shift) & mask; }
};

constexpr int kMaxDigitBits = 11;  // counters of a pass stay in the first-level cache

// Bits that tell keys below `limit` apart.
inline int key_bits(uint64_t limit) { return limit <= 1 ? 0 : std::bit_width(limit - 1); }

// Sorts by the low `bits` of the keys, in `entries` or in `spare`; returns the one that holds the result.
template <typename Entry>
Entry* radix_sort(Entry* entries, Entry* spare, int64_t n, int bits) {
  if (n < 2 || bits == 0) return entries;
  if (n <= 48) {
    for (int64_t i = 1; i < n; ++i) {
      const Entry entry = entries[i];
      int64_t j = i;
      for (; j > 0 && entries[j - 1].key() > entry.key(); --j) entries[j] = entries[j - 1];
      entries[j] = entry;
    }
    return entries;
  }
  constexpr int kMaxPasses = (64 + kMaxDigitBits - 1) / kMaxDigitBits;
  // Few entries: smaller digits, so that counters do not outnumber entries by much.
  const int digit_limit =
      std::min(kMaxDigitBits, std::max(8, static_cast<int>(std::bit_width(static_cast<uint64_t>(n))) - 1));
  const int passes = std::min(kMaxPasses, (bits + digit_limit - 1) / digit_limit);
  const int digit_bits = (bits + passes - 1) / passes;
  const uint32_t mask = (1u << digit_bits) - 1;
  // How often each digit occurs does not change from pass to pass: counted two passes at a time, in one sweep.
  uint32_t counts[2][1 << kMaxDigitBits];
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = pass * digit_bits;
    uint32_t* const count = counts[pass % 2];
    if (pass % 2 == 0) {
      std::memset(counts[0], 0, sizeof(uint32_t) << digit_bits);
      std::memset(counts[1], 0, sizeof(uint32_t) << digit_bits);
      const int next = pass + 1 < passes ? shift + digit_bits : shift;
      for (int64_t i = 0; i < n; ++i) {
        ++counts[0][entries[i].digit(shift, mask)];
        ++counts[1][entries[i].digit(next, mask)];
      }
    }
    if (count[entries[0].digit(shift, mask)] == n) continue;
    uint32_t sum = 0;
    for (uint32_t d = 0; d <= mask; ++d) sum += std::exchange(count[d], sum);
    for (int64_t i = 0; i < n; ++i) {
      const Entry entry = entries[i];
      spare[count[entry.digit(shift, mask)]++] = entry;
    }
    std::swap(entries, spare);
  }
  return entries;
}

// The same for one large array, on all workers: each pass counts and scatters chunk by chunk.
template <typename Entry>
Entry* parallel_radix_sort(const sok_context& context, Entry* entries, Entry* spare, int64_t n, int bits) {
  constexpr int64_t kChunk = 1 << 16;
  const int64_t chunks = ceil_div(n, kChunk);
  if (num_workers(context) == 1 || chunks < 2) return radix_sort(entries, spare, n, bits);
  if (bits == 0) return entries;
  const int passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits;
  const int digit_bits = (bits + passes - 1) / passes;
  const int64_t digits = int64_t{1} << digit_bits;
  const uint32_t mask = static_cast<uint32_t>(digits - 1);
  Buffer<uint32_t> counts(context, chunks * digits);
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = pass * digit_bits;
    parallel_for(context, chunks, [&](int64_t chunk, int32_t) {
      uint32_t* const count = counts.data() + chunk * digits;
      std::memset(count, 0, static_cast<size_t>(digits) * sizeof(uint32_t));
      const int64_t end = std::min(n, (chunk + 1) * kChunk);
      for (int64_t i = chunk * kChunk; i < end; ++i) ++count[entries[i].digit(shift, mask)];
    });
    uint32_t sum = 0;
    for (int64_t d = 0; d < digits; ++d) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += std::exchange(counts[chunk * digits + d], sum);
    }
    parallel_for(context, chunks, [&](int64_t chunk, int32_t) {
      uint32_t* const place = counts.data() + chunk * digits;
      const int64_t end = std::min(n, (chunk + 1) * kChunk);
      for (int64_t i = chunk * kChunk; i < end; ++i) {
        const Entry entry = entries[i];
        spare[place[entry.digit(shift, mask)]++] = entry;
      }
    });
    std::swap(entries, spare);
  }
  return entries;
}

}  // namespace sok::cpu

#endif  // SOK_CPU_SORT_H_
