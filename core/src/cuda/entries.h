// SPDX-License-Identifier: Apache-2.0
// Parts of gradients as one list of (key, value) pairs, ready to be sorted: what apply, reduce and spread begin with.
#ifndef SOK_CUDA_ENTRIES_H_
#define SOK_CUDA_ENTRIES_H_

#include <cstdint>
#include <vector>

#include "common/call.h"
#include "common/error_record.h"
#include "cuda/launch.h"
#include "cuda/segments.h"
#include "cuda/upload.h"

namespace sok::cuda {

// Whether rows of values can be read 16 bytes at once.
inline bool are_aligned(const Vectors& values) { return is_aligned(values.data) && values.stride % 4 == 0; }

// Numbers of the vectors of bags, so that the vector of number v begins at v * stride(values): those of the bags, and
// of members that lie side by side the vectors of each row one after another.
struct BagNumbers {
  // Whether there are such numbers: not where the rows of members are no multiple of a vector, or too many.
  static bool exist(const Vectors& values) {
    return values.batch == 0 || (values.dimension > 0 && values.stride % values.dimension == 0 &&
                                 values.batch * (values.stride / values.dimension) <= kMaxEntries);
  }
  static int64_t stride(const Vectors& values) { return values.batch == 0 ? values.stride : values.dimension; }
  // Numbers are below it.
  static int64_t limit(const Vectors& values, int64_t num_bags) {
    return values.batch == 0 ? num_bags : values.batch * (values.stride / values.dimension);
  }
  SOK_HOST_DEVICE static uint32_t of(const Vectors& values, uint32_t bag) {
    if (values.batch == 0) return bag;
    const auto batch = static_cast<uint32_t>(values.batch);
    const uint32_t member = bag / batch;
    return (bag - member * batch) * (static_cast<uint32_t>(values.stride) / static_cast<uint32_t>(values.dimension)) +
           member;
  }
};

// One part. Entry e of it becomes list entry first_entry + e.
struct EntryPart {
  const void* slots;          // nullptr: padding entries, or no keys are wanted
  const int64_t* row_splits;  // nullptr: entry e has row e and is a bag of its own
  const float* weights;       // nullptr: all 1
  Vectors values;             // data nullptr: adds nothing
  float* row_scales;          // out, where values are rows that have scales: one a number of BagNumbers
  uint64_t first_key;
  int64_t limit;  // of slots; keys are first_key + slot, padding has first_key +
                  // limit
  uint32_t num_entries;
  uint32_t num_rows;
  uint32_t first_entry;
  uint32_t dimension;
  uint32_t first_block;  // EntryPlan sets it
  int32_t table;
  uint8_t combiner;
  bool slots_64bit;
};

// A part of a gradient, and entries that fill a list up.
EntryPart make_entry_part(const Gradient& gradient, const Columns& owner, int64_t first_key, int64_t first_entry);
EntryPart make_padding(const Columns& owner, int64_t first_key, int64_t first_entry, int64_t count);

// What the values of the list are.
enum class EntryValues : int32_t {
  kRows,     // numbers of the vectors of the part (BagNumbers), which has no scales or keeps them in row_scales
  kSources,  // the entry's own number, which names an EntrySource
};

// Enqueues the making of the list in two steps, before and after upload.send(). Wrong slots and row splits are
// reported, *gate becomes 1 then, and nothing outside the arrays is read.
class EntryPlan {
 public:
  EntryPlan(std::vector<EntryPart> parts, EntryValues values, Upload& upload);

  template <typename Key>
  void run(const Scope& scope, const Upload& upload, Key* keys, uint32_t* values, EntrySource* sources, int32_t* gate,
           sok_error_record* errors) const;

 private:
  EntryValues values_;
  size_t parts_;
  uint32_t num_parts_;
  int64_t num_blocks_ = 0;
};

}  // namespace sok::cuda

#endif  // SOK_CUDA_ENTRIES_H_
