// SPDX-License-Identifier: Apache-2.0
// Groups the entries of each table by key: what route, reduce and apply have in common.
#ifndef SOK_CPU_GROUP_H_
#define SOK_CPU_GROUP_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/call.h"
#include "common/memory.h"
#include "common/parallel.h"
#include "cpu/sort.h"

namespace sok::cpu {

// One table's entries to be grouped. They are written by `fill` piece by piece; pieces are independent of each other.
struct GroupJob {
  int64_t size = 0;    // entries
  uint64_t limit = 0;  // keys are below it
  int64_t pieces = 0;
};

// Distinct keys ascending; key u has the payloads order[splits[u] .. splits[u + 1]), in the order of the entries.
struct Group {
  int64_t count = 0;
  const uint32_t* order = nullptr;
  const int32_t* splits = nullptr;
  const uint32_t* keys32 = nullptr;  // nullptr when the job's limit is above 2^32
  const int64_t* keys64 = nullptr;

  uint64_t key(int64_t u) const { return keys32 != nullptr ? keys32[u] : static_cast<uint64_t>(keys64[u]); }
};

template <typename Entry>
struct GroupOutput {
  uint32_t* order;
  int32_t* splits;
  uint32_t* keys32;
  int64_t* keys64;

  void set_key(int64_t u, uint64_t key) const {
    if constexpr (sizeof(Entry) == sizeof(NarrowEntry)) {
      keys32[u] = static_cast<uint32_t>(key);
    } else {
      keys64[u] = static_cast<int64_t>(key);
    }
  }
};

// Entries [begin, end) of the sorted n, of which `begin` starts or continues key number u. Returns the last key's
// number plus one.
template <typename Entry>
int64_t split_groups(const Entry* entries, int64_t begin, int64_t end, int64_t n, int64_t u,
                     const GroupOutput<Entry>& out) {
  if (begin == end) return u;
  uint64_t key = entries[begin].key();
  for (int64_t i = begin; i < end; ++i) {
    out.order[i] = entries[i].payload();
    out.set_key(u, key);
    out.splits[u + 1] = static_cast<int32_t>(i + 1);
    const uint64_t next = i + 1 < n ? entries[i + 1].key() : ~key;
    u += next != key;
    key = next;
  }
  return u;
}

template <typename Entry>
int64_t parallel_split_groups(const sok_context& context, const Entry* entries, int64_t n,
                              const GroupOutput<Entry>& out) {
  constexpr int64_t kChunk = 1 << 16;
  const int64_t chunks = ceil_div(n, kChunk);
  out.splits[0] = 0;
  if (chunks < 2) return split_groups(entries, 0, n, n, 0, out);
  // Ends of groups in each chunk, then their running sum: the number of the group that a chunk begins in.
  std::vector<int64_t> ends(static_cast<size_t>(chunks) + 1, 0);
  parallel_for(context, chunks, [&](int64_t chunk, int32_t) {
    int64_t count = 0;
    const int64_t end = std::min(n, (chunk + 1) * kChunk);
    for (int64_t i = chunk * kChunk; i < end; ++i) count += i + 1 == n || entries[i].key() != entries[i + 1].key();
    ends[static_cast<size_t>(chunk) + 1] = count;
  });
  for (size_t i = 1; i < ends.size(); ++i) ends[i] += ends[i - 1];
  parallel_for(context, chunks, [&](int64_t chunk, int32_t) {
    const int64_t begin = chunk * kChunk, end = std::min(n, begin + kChunk);
    const int64_t u = ends[static_cast<size_t>(chunk)];
    // A group that goes on in the next chunk is written there, where its end is known.
    int64_t stop = end;
    if (end < n) {
      while (stop > begin && entries[stop - 1].key() == entries[end].key()) --stop;
      for (int64_t i = stop; i < end; ++i) out.order[i] = entries[i].payload();
    }
    split_groups(entries, begin, stop, n, u, out);
  });
  return ends.back();
}

// Memory of the groups of a call.
class Groups {
 public:
  // fill(job, piece, entries) writes the entries of a piece at their places in the job's array; it is called for arrays
  // of NarrowEntry and of WideEntry. What it throws is thrown here.
  template <typename Fill>
  Groups(const sok_context& context, const std::vector<GroupJob>& jobs, Fill&& fill) : groups_(jobs.size()) {
    int64_t total = 0, narrow = 0;
    for (const GroupJob& job : jobs) {
      total += job.size;
      narrow += is_narrow(job) ? job.size : 0;
    }
    order_ = Buffer<uint32_t>(context, total);
    splits_ = Buffer<int32_t>(context, total + static_cast<int64_t>(jobs.size()));
    keys32_ = Buffer<uint32_t>(context, narrow);
    keys64_ = Buffer<int64_t>(context, total - narrow);

    // Tables take turns on the workers, unless one has more than a worker's share of the entries: all work on that one.
    const int32_t workers = num_workers(context);
    std::vector<size_t> shared, whole;
    int64_t scratch = 0;
    for (size_t j = 0; j < jobs.size(); ++j) {
      if (jobs[j].size == 0) {
        for (int64_t piece = 0; piece < jobs[j].pieces; ++piece) fill(j, piece, static_cast<NarrowEntry*>(nullptr));
      } else if (workers > 1 && jobs[j].size >= kLarge && jobs[j].size > total / workers) {
        shared.push_back(j);
      } else {
        whole.push_back(j);
        scratch = std::max(scratch, jobs[j].size * (is_narrow(jobs[j]) ? 8 : 16));
      }
    }
    prepare(jobs);
    // The largest first, so that the last ones to end are small.
    std::stable_sort(whole.begin(), whole.end(), [&](size_t a, size_t b) { return jobs[a].size > jobs[b].size; });
    const int64_t stride = ceil_div(scratch, 64) * 64;
    const int64_t tasks = static_cast<int64_t>(whole.size());
    const Buffer<char> memory(context, 2 * stride * std::min<int64_t>(workers, tasks));
    parallel_for(context, tasks, [&](int64_t task, int32_t worker) {
      const size_t j = whole[static_cast<size_t>(task)];
      char* const first = memory.data() + 2 * stride * worker;
      const auto run = [&](auto* entries, auto* spare) {
        for (int64_t piece = 0; piece < jobs[j].pieces; ++piece) fill(j, piece, entries);
        const auto* sorted = radix_sort(entries, spare, jobs[j].size, key_bits(jobs[j].limit));
        const auto out = output<std::remove_pointer_t<decltype(entries)>>(j);
        out.splits[0] = 0;
        groups_[j].count = split_groups(sorted, 0, jobs[j].size, jobs[j].size, 0, out);
      };
      if (is_narrow(jobs[j])) {
        run(reinterpret_cast<NarrowEntry*>(first), reinterpret_cast<NarrowEntry*>(first + stride));
      } else {
        run(reinterpret_cast<WideEntry*>(first), reinterpret_cast<WideEntry*>(first + stride));
      }
    });
    for (const size_t j : shared) {
      if (is_narrow(jobs[j])) {
        group_together<NarrowEntry>(context, j, jobs[j], fill);
      } else {
        group_together<WideEntry>(context, j, jobs[j], fill);
      }
    }
  }

  const Group& operator[](size_t job) const { return groups_[job]; }

 private:
  static constexpr int64_t kLarge = 1 << 16;

  static bool is_narrow(const GroupJob& job) { return job.limit <= uint64_t{1} << 32; }

  void prepare(const std::vector<GroupJob>& jobs) {
    uint32_t* order = order_.data();
    int32_t* splits = splits_.data();
    uint32_t* keys32 = keys32_.data();
    int64_t* keys64 = keys64_.data();
    for (size_t j = 0; j < jobs.size(); ++j) {
      Group& group = groups_[j];
      group.order = order;
      group.splits = splits;
      order += jobs[j].size;
      splits += jobs[j].size + 1;
      if (is_narrow(jobs[j])) {
        group.keys32 = keys32;
        keys32 += jobs[j].size;
      } else {
        group.keys64 = keys64;
        keys64 += jobs[j].size;
      }
    }
  }

  template <typename Entry>
  GroupOutput<Entry> output(size_t j) const {
    const Group& group = groups_[j];
    return {const_cast<uint32_t*>(group.order), const_cast<int32_t*>(group.splits), const_cast<uint32_t*>(group.keys32),
            const_cast<int64_t*>(group.keys64)};
  }

  template <typename Entry, typename Fill>
  void group_together(const sok_context& context, size_t j, const GroupJob& job, Fill& fill) {
    const Buffer<Entry> entries(context, job.size), spare(context, job.size);
    parallel_for(context, job.pieces, [&](int64_t piece, int32_t) { fill(j, piece, entries.data()); });
    const Entry* sorted = parallel_radix_sort(context, entries.data(), spare.data(), job.size, key_bits(job.limit));
    groups_[j].count = parallel_split_groups(context, sorted, job.size, output<Entry>(j));
  }

  std::vector<Group> groups_;
  Buffer<uint32_t> order_;
  Buffer<int32_t> splits_;
  Buffer<uint32_t> keys32_;
  Buffer<int64_t> keys64_;
};

}  // namespace sok::cpu

#endif  // SOK_CPU_GROUP_H_
