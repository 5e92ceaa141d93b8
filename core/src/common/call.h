// SPDX-License-Identifier: Apache-2.0
// The arguments of a call after the checks that need no tensor contents: what every backend works from. Contents (keys,
// row splits, slots) may lie on another device and are checked by the backend that reads them.
#ifndef SOK_COMMON_CALL_H_
#define SOK_COMMON_CALL_H_

#include <cstdint>
#include <vector>

#include "common/host_device.h"
#include "common/optimizer_constants.h"
#include "common/status.h"
#include "sok/sok.h"
#include "table/placement.h"

namespace sok {

// Entries, bags and unique keys of one call are numbered in 32 bits.
constexpr int64_t kMaxEntries = INT32_MAX;

// An array of float32, float16 or bfloat16 numbers.
struct Floats {
  void* data = nullptr;
  sok_dtype dtype = SOK_FLOAT32;

  int64_t item_size() const { return dtype == SOK_FLOAT32 ? 4 : 2; }
  // The number at `element` and those behind it.
  Floats at(int64_t element) const { return {static_cast<char*>(data) + element * item_size(), dtype}; }
};

// What every stage knows of a table of its call.
struct TableId {
  const char* name = nullptr;
  int32_t number = 0;  // what a device calls it in an error record: its position in the call, or of TableNames
  int64_t dimension = 0;
};

// To the stages before the slots are known.
struct Table : TableId {
  Placement placement;
};

// To those that have slots.
struct Columns : TableId {
  Floats weight;
  int64_t num_slots = 0;           // rows of `weight`
  const int32_t* since = nullptr;  // the generation in which each slot got its key; nullptr: slots keep their keys
  int64_t freed = 0;               // the last generation in which one lost it
  sok_dynamic_table* owner = nullptr;
  const sok_index* index = nullptr;  // lookups name rows by key, where a stage checks that they may
};

// An array of int32 or int64 numbers.
struct Integers {
  const void* data = nullptr;
  int64_t size = 0;
  bool is_64bit = true;
};

// Rows that initialize fills. Row i is that of keys[i], or without keys of first_key + i * key_stride.
struct InitialRows {
  Integers keys;  // its size is the number of rows, also where data is nullptr
  uint64_t first_key = 0, key_stride = 0;
  int64_t dimension = 0;
  Floats rows;
};

// sok_columns::since as it is written: what each slot gets. nullptr: it is not.
struct Generations {
  int32_t* since = nullptr;
  int32_t generation = 0;
};

// A column of a table of which initialize_new fills the rows that a call has given to keys.
struct NewRows {
  Integers keys;
  const int64_t* slots;   // of each
  const uint8_t* is_new;  // of each: 1 where it is to be filled
  sok_initializer initializer;
  int64_t dimension;
  Floats rows;  // of all slots
  Generations since = {};
};

// Pooled vectors or their gradients, float32. Those of a table are [bags, dimension], whose rows may lie apart; those
// of the members of a stack lie side by side, [batch, members * dimension].
struct Vectors {
  float* data = nullptr;  // nullptr: absent
  int64_t stride = 0;     // elements from a bag's to the next of the same member
  int64_t batch = 0;      // bags of each member; 0: the table has none
  int64_t dimension = 0;  // of a vector

  // Elements before the vector of a bag.
  SOK_HOST_DEVICE int64_t offset(int64_t bag) const {
    if (batch == 0) return bag * stride;
    const int64_t member =
        static_cast<uint32_t>(bag) / static_cast<uint32_t>(batch);  // a call has fewer than 2^31 bags
    return (bag - member * batch) * stride + member * dimension;
  }
  SOK_HOST_DEVICE float* at(int64_t bag) const { return data + offset(bag); }
};

struct Lookup {
  int32_t number = 0;  // its position in the call
  int32_t table = 0;
  TableId id;  // of the table
  sok_combiner combiner = SOK_SUM;
  Integers keys;                        // or slots, in stages that read rows of tables
  bool located = false;                 // they are slots that locate gave
  int64_t* slots = nullptr;             // what locate writes
  const int64_t* row_splits = nullptr;  // nullptr: each key is a bag
  const float* weights = nullptr;
  Vectors output;
  int64_t num_bags = 0;
  int64_t first_entry = 0;  // number of its first entry in the call
  int64_t generation = INT64_MAX;
  int32_t num_members = 0;              // of a stack; 0: the table is none
  const sok_member* members = nullptr;  // known where keys are read

  int64_t batch() const { return num_members == 0 ? num_bags : num_bags / num_members; }
};

inline const char* name_of(const sok_member& member) { return member.name != nullptr ? member.name : "table"; }

struct Gradient {  // a summand of the gradient of one table
  sok_combiner combiner = SOK_SUM;
  bool unique = false;
  Integers slots;
  Vectors values;
  const int64_t* row_splits = nullptr;  // nullptr: entry j has row j
  const float* weights = nullptr;
  int64_t num_rows = 0;
  int64_t generation = 0;  // of the slots
};

// Slots below 0 are no slots of any generation: who uses them reports them.
SOK_HOST_DEVICE inline bool has_lost_key(const int32_t* since, int64_t num_slots, int64_t slot, int64_t generation) {
  return slot >= num_slots || (slot >= 0 && since[slot] > generation);
}

struct Update {
  Columns table;
  sok_optimizer optimizer;
  double gradient_scale = 1.0;
  int32_t num_states = 0;
  float* states[SOK_MAX_STATES] = {};
  std::vector<Gradient> gradients;
  int64_t* stamps = nullptr;  // one a slot, or nullptr: not kept
  int64_t stamp = 0;
};

// The caller's word that rows may change.
struct Agreement {
  sok_agree agree = nullptr;  // nullptr: nobody has to be asked
  void* opaque = nullptr;

  void ask() const {
    SOK_CHECK_STATUS(SOK_FAILED_PRECONDITION, agree == nullptr || agree(opaque) == 0, "the caller stopped the step");
  }
};

// Where route writes a count matrix (sok/messages.h).
struct CountMatrix {
  int64_t* data;
  int64_t num_ranks, num_columns, num_tables, num_lookups;

  SOK_HOST_DEVICE int64_t& keys(int64_t rank, int64_t table) const { return data[rank * num_columns + table]; }
  SOK_HOST_DEVICE int64_t& bag_keys(int64_t rank, int64_t lookup) const { return keys(rank, num_tables + lookup); }
  SOK_HOST_DEVICE int64_t& bag_splits(int64_t rank, int64_t lookup) const {
    return keys(rank, num_tables + num_lookups + lookup);
  }
};

struct Routing {
  int64_t* keys;
  CountMatrix counts;
  int64_t* inverse;
  int32_t* order;
  int32_t* unique_splits;
  int64_t* bag_keys;
  int64_t* bag_splits;
};

// The unique keys of a requester, as spread needs them.
struct UniqueRows {
  const int64_t* counts;  // [num_ranks, num_tables]
  const int64_t* sums;    // [num_ranks] elements of sums behind the rows of each rank
  const int32_t* order;
  const int32_t* unique_splits;
};

struct Copy {
  const void* source;
  void* target;
  int64_t bytes;
};

// What a stage does with the keys of lookups, and their slots.
enum class Keys {
  kRead,     // reads the keys
  kCounted,  // only wants to know how many there are
  kLocated,  // reads the keys and writes the slots
  kSlots     // reads the slots, or the keys in their place
};
enum class Output { kWritten, kIgnored };

const sok_context& check_context(const sok_context* context);

// Whether what the device finds goes to a record of the caller's.
bool has_error_record(const sok_context& context);

std::vector<Table> check_placements(const sok_context& context, int32_t num_tables, const sok_placement* tables);
std::vector<Columns> check_columns(const sok_context& context, int32_t num_tables, const sok_columns* tables);
// Number `position` of a call.
Columns check_columns(const sok_context& context, const sok_columns* table, int32_t position = 0);

// All tables must agree on num_ranks, which is returned (1 when there are none).
int32_t check_num_ranks(const std::vector<Table>& tables);

// T: Table or Columns.
template <typename T>
std::vector<Lookup> check_lookups(const std::vector<T>& tables, int32_t num_lookups, const sok_lookup* lookups,
                                  Keys keys, Output output);

inline int64_t count_entries(const std::vector<Lookup>& lookups) {
  return lookups.empty() ? 0 : lookups.back().first_entry + lookups.back().keys.size;
}

// One for each lookup; absent ones stand for zeros.
std::vector<Vectors> check_output_gradients(const std::vector<Lookup>& lookups, const sok_tensor* output_gradients);

std::vector<Gradient> check_gradients(const Columns& table, int32_t num_gradients, const sok_gradient* gradients);
std::vector<Update> check_updates(const sok_context& context, int32_t num_updates, const sok_update* updates);

// Rounded to float32 once a call.
OptimizerConstants make_constants(const Update& update);

}  // namespace sok

#endif  // SOK_COMMON_CALL_H_
