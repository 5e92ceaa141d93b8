// SPDX-License-Identifier: Apache-2.0
// A dynamic table (sok/dynamic_table.h): an index and columns that grow with it, for every backend.
#ifndef SOK_TABLE_DYNAMIC_TABLE_H_
#define SOK_TABLE_DYNAMIC_TABLE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "sok/dynamic_table.h"
#include "table/admission.h"
#include "table/eviction.h"
#include "table/hash_index.h"
#include "table/reserved_range.h"
#include "table/tiers.h"
#include "table/use_times.h"

struct sok_dynamic_table {
 public:
  static constexpr int32_t kNoKey = INT32_MAX;  // in `since`
  static constexpr int64_t kSinceBytes = sizeof(int32_t);
  static constexpr int64_t kMostGenerations = INT32_MAX - 2;  // as scores take them
  static constexpr int64_t kNumberedLower = int64_t{1} << 30;

  // Throws Error, as everything here that may fail; nothing has changed then. A CUDA device is the current one in every
  // call, also when the table is destroyed, and temporary memory comes from the context.
  explicit sok_dynamic_table(const sok_dynamic_table_config& config);

  sok_hash_index& index() const { return *index_; }
  const sok_index* as_index() const { return &seam_; }
  int64_t generation() const { return generation_; }
  // The number that a generation has now: one above the running one got it before they were numbered anew.
  int64_t numbered_now(int64_t generation) const {
    return was_numbered_anew_ && generation > generation_ ? generation - kNumberedLower : generation;
  }
  // Whether they are numbered anew with the next.
  bool is_at_last_generation() const { return generation_ >= kMostGenerations; }
  int64_t generation_before(double seconds) const;
  const sok::UseTimes& use_times() const { return times_; }
  void set_use_times(const sok_use_time* times, int64_t n);
  sok_columns columns() const;
  int64_t dimension() const { return columns_[0].width; }
  const sok_initializer& initializer() const { return columns_[0].initializer; }
  int64_t bytes() const;
  int64_t host_bytes() const;

  int32_t add_column(const sok_context& context, sok_dtype dtype, int64_t width, double initial);
  int32_t num_columns() const { return static_cast<int32_t>(columns_.size()); }
  sok_tensor column(int32_t number) const;

  // Puts memory behind the slots that so many new keys may take, in every column.
  void make_room_for(const sok_context& context, int64_t n);
  // What gives up rows where the table is full; nullptr: nothing does.
  sok::Eviction* eviction() const { return eviction_.get(); }
  // nullptr: all rows are in one memory.
  sok::Tiers* tiers() const { return tiers_.get(); }
  // Of a call that has begun: what brings rows of these slots to the device's memory.
  sok::TierRequest tier_request(std::vector<sok::TierRequest::Slots> slots);
  // Begins a call that brings rows ahead of a step.
  void begin_ahead(const sok_context& context);
  // nullptr: every key gets a row.
  sok::Admission* admission() const { return admission_.get(); }
  void end_step() {
    if (eviction_ != nullptr) eviction_->end_step();
    step_is_over_ = true;
  }
  // After a call: what it used beside the steps, where none runs, the next one does not use.
  void end_beside() {
    if (step_is_over_) end_step();
  }
  void set_scores(const sok_context& context, const int64_t* slots, const int64_t* scores, int64_t n);
  sok_dynamic_table_counts counts() const;
  // Before and after so many keys are inserted into the index. flags: SOK_LOCATE_*.
  void begin(const sok_context& context, int64_t num_keys, uint32_t flags);
  void end(int64_t num_keys);
  // What initialize_new has to fill once `request` is answered: the rows, then the other columns.
  void add_new_rows(const sok::HashRequest& request, std::vector<sok::NewRows>& rows) const;
  // asked: see HashRequest.
  void find_or_insert(const sok_context& context, const sok::Integers& keys, int64_t* slots,
                      const uint8_t* asked = nullptr);
  void erase(const sok_context& context, const sok::Integers& keys, int64_t* slots, const uint8_t* asked = nullptr);
  void clear(const sok_context& context);
  // Returns the bytes that are given back. shrink.cc.
  int64_t shrink(const sok_context& context);
  void read(const sok_context& context, const sok::Integers& keys, void* rows) const;
  // What goes for the keys of a call, and how many; without `count` nobody asks for it.
  struct Evicted {
    int64_t* keys = nullptr;
    void* rows = nullptr;
    int64_t* count = nullptr;
  };
  void read_and_evict(const sok_context& context, const sok::Integers& keys, void* rows, const Evicted& evicted);

 private:
  // Rows of keys at their slots, -1: the initial one.
  void read_at(const sok_context& context, const sok::Integers& keys, const int64_t* slots, void* rows) const;
  sok::Columns rows_of_table() const;

  // Of shrink: an index of the same keys at the slots [0, size), in the order in which they had theirs, and those.
  std::unique_ptr<sok_hash_index> compacted(const sok_context& context, int64_t size, int64_t* old_slots) const;
  // The slots that every column has memory for.
  int64_t backed_slots() const;

  // Begins the next generation. Enqueues, where all are numbered anew.
  void advance(const sok_context& context);
  // Generations get numbers that are lower by kNumberedLower, 0 at least.
  void number_anew(const sok_context& context);
  // Later generations are after this one.
  void go_on_from(int64_t generation);
  // In the running generation.
  void erase_now(const sok_context& context, const sok::HashRequest& request);
  // Erases what has expired among the next `n` slots.
  void expire(const sok_context& context, int64_t n);
  // Of n slots from `first` on those whose last use was not after `last`.
  void expire_among(const sok_context& context, int64_t first, int64_t n, int64_t last);

  struct Column {
    std::unique_ptr<sok::ReservedRange> memory;
    sok_dtype dtype;
    int64_t width;
    sok_initializer initializer;

    int64_t bytes_of(int64_t slots) const;
    // As numbers that an initializer writes, and how many of them a slot has: integers are 0 at first, and so are their
    // halves as float32.
    bool is_integer() const { return dtype == SOK_INT64; }
    sok::Floats floats() const { return {memory->data(), is_integer() ? SOK_FLOAT32 : dtype}; }
    int64_t num_floats() const { return is_integer() ? 2 * width : width; }
  };

  Column make_column(sok_dtype dtype, int64_t width, const sok_initializer& initializer) const;
  // Puts memory behind so many slots of every column.
  void grow(int64_t slots);

  // device_bytes: as of sok_reserved_range_config.
  std::unique_ptr<sok::ReservedRange> reserve(int64_t bytes, int64_t device_bytes = 0) const;
  int32_t* since() const { return reinterpret_cast<int32_t*>(since_->data()); }

  std::unique_ptr<sok_hash_index> index_;
  std::vector<Column> columns_;
  std::unique_ptr<sok::ReservedRange> since_;  // int32, sok_columns::since
  std::unique_ptr<sok::Eviction> eviction_;
  std::unique_ptr<sok::Tiers> tiers_;
  std::unique_ptr<sok::Admission> admission_;
  bool step_is_over_ = true;
  const double time_to_live_;
  sok::UseTimes times_;
  int64_t next_to_expire_ = 0;  // a slot
  int64_t generation_ = 0, freed_ = 0;
  bool was_numbered_anew_ = false;
  int64_t num_lookups_ = 0;
  sok_dynamic_table_counts before_shrink_ = SOK_DYNAMIC_TABLE_COUNTS_INIT;  // of indices that are gone
  sok_index seam_;
};

namespace sok {

using DynamicTable = sok_dynamic_table;

// Rows of keys that have got their slots come to the device's memory, of tables in two memories; the slots become
// theirs. requests[i]: to tables[i]. Throws Error, as what follows.
void bring_rows(const sok_context& context, const std::vector<DynamicTable*>& tables,
                const std::vector<HashRequest>& requests);

// sok_dynamic_table_prefetch.
void prefetch(const sok_context& context, const std::vector<DynamicTable*>& tables, const std::vector<Integers>& keys);

}  // namespace sok

#endif  // SOK_TABLE_DYNAMIC_TABLE_H_
