// SPDX-License-Identifier: Apache-2.0
#include "common/call.h"

#include <algorithm>
#include <cmath>

#include "common/error_record.h"
#include "common/status.h"
#include "common/tensor.h"

namespace sok {
namespace {

template <typename T>
void check_struct(const T* value, size_t size, const Label& what) {
  SOK_CHECK(value != nullptr, what, " is NULL");
  SOK_CHECK(value->struct_size == size, what, ".struct_size is ", value->struct_size, ", must be ", size,
            ": the caller was compiled for another version of the library, or did not initialise the struct");
}

sok_combiner check_combiner(int32_t combiner, const Label& what) {
  SOK_CHECK(combiner == SOK_SUM || combiner == SOK_MEAN || combiner == SOK_SQRTN, what, " is ", combiner,
            ", must be SOK_SUM, SOK_MEAN or SOK_SQRTN");
  return static_cast<sok_combiner>(combiner);
}

// T: sok_placement or sok_columns.
template <typename T>
TableId check_table(const sok_context& context, const T* table, int32_t position) {
  check_struct(table, sizeof(T), {"table"});
  TableId result;
  result.name = table->name != nullptr ? table->name : "table";
  result.number = has_error_record(context) ? context.errors->keeper->names.number_of(result.name) : position;
  return result;
}

// Of a lookup whose keys are read: what its members are to the stack.
const sok_member* check_members(const sok_lookup& lookup, int32_t number, const std::vector<Table>& tables) {
  const Table& stack = tables[static_cast<size_t>(lookup.table)];
  const Label label = {"lookups", number, "members", stack.name};
  SOK_CHECK(lookup.members != nullptr, label, " is NULL");
  SOK_CHECK(stack.placement.num_rows != Placement::kAnyKey, label, ": a dynamic table has none");
  for (int32_t i = 0; i < lookup.num_members; ++i) {
    const sok_member& member = lookup.members[i];
    SOK_CHECK(
        member.num_rows >= 1 && member.first_key >= 0 && member.first_key <= stack.placement.num_rows - member.num_rows,
        label, ": number ", i, " has the ", member.num_rows, " rows from ", member.first_key, " on, of ",
        stack.placement.num_rows);
  }
  return lookup.members;
}

// Nothing reads them where keys are slots.
const sok_member* check_members(const sok_lookup&, int32_t, const std::vector<Columns>&) { return nullptr; }

void check_array(int32_t num_tables, const void* tables) {
  SOK_CHECK(num_tables >= 0, "num_tables is ", num_tables, ", must not be negative");
  SOK_CHECK(num_tables == 0 || tables != nullptr, "tables is NULL");
}

}  // namespace

bool has_error_record(const sok_context& context) {
  return context.device.type == SOK_CUDA && context.errors != nullptr;
}

const sok_context& check_context(const sok_context* context) {
  check_struct(context, sizeof(sok_context), {"context"});
  SOK_CHECK(context->device.type == SOK_CPU || context->device.type == SOK_CUDA, "context.device.type is ",
            context->device.type, ", must be SOK_CPU or SOK_CUDA");
  SOK_CHECK((context->allocator.allocate == nullptr) == (context->allocator.release == nullptr),
            "context.allocator: allocate and release must both be given or both be NULL");
  if (context->device.type == SOK_CPU) {
    SOK_CHECK(context->executor.num_workers >= 1, "context.executor.num_workers is ", context->executor.num_workers,
              ", must be at least 1");
  }
  return *context;
}

std::vector<Table> check_placements(const sok_context& context, int32_t num_tables, const sok_placement* tables) {
  check_array(num_tables, tables);
  std::vector<Table> result(static_cast<size_t>(num_tables));
  for (int32_t i = 0; i < num_tables; ++i) {
    const sok_placement& from = tables[i];
    Table& to = result[static_cast<size_t>(i)];
    static_cast<TableId&>(to) = check_table(context, &from, i);
    SOK_CHECK(from.num_ranks >= 1, "table '", to.name, "': num_ranks is ", from.num_ranks, ", must be at least 1");
    SOK_CHECK(from.rank >= 0 && from.rank < from.num_ranks, "table '", to.name, "': rank is ", from.rank,
              ", must be in [0, ", from.num_ranks, ")");
    SOK_CHECK(from.owner >= -1 && from.owner < from.num_ranks, "table '", to.name, "': owner is ", from.owner,
              ", must be -1 or a rank in [0, ", from.num_ranks, ")");
    SOK_CHECK(from.dimension >= 1, "table '", to.name, "': dimension is ", from.dimension, ", must be at least 1");
    SOK_CHECK(from.dimension <= INT32_MAX, "table '", to.name, "': dimension ", from.dimension, " is too large");
    SOK_CHECK(from.num_rows >= 1 || from.num_rows == SOK_ANY_KEY, "table '", to.name, "': num_rows is ", from.num_rows,
              ", must be at least 1, or SOK_ANY_KEY");
    to.dimension = from.dimension;
    to.placement = {from.owner, from.num_ranks, from.rank,
                    from.num_rows == SOK_ANY_KEY ? Placement::kAnyKey : from.num_rows};
  }
  return result;
}

Columns check_columns(const sok_context& context, const sok_columns* table, int32_t position) {
  Columns result;
  static_cast<TableId&>(result) = check_table(context, table, position);
  result.weight = check_floats(table->weight, {"weight", -1, nullptr, result.name}, {kAnySize, kAnySize});
  result.num_slots = table->weight.shape[0];
  result.dimension = table->weight.shape[1];
  if (!is_absent(table->since)) {
    result.since =
        checked_data<const int32_t>(table->since, {"since", -1, nullptr, result.name}, SOK_INT32, {result.num_slots});
    result.freed = table->freed;
    result.owner = table->owner;
  }
  result.index = table->index;
  SOK_CHECK(result.dimension >= 1 && result.dimension <= INT32_MAX, "table '", result.name, "': weight has ",
            result.dimension, " columns, must have 1 at least and fewer than 2^31");
  return result;
}

std::vector<Columns> check_columns(const sok_context& context, int32_t num_tables, const sok_columns* tables) {
  check_array(num_tables, tables);
  std::vector<Columns> result;
  result.reserve(static_cast<size_t>(num_tables));
  for (int32_t i = 0; i < num_tables; ++i) result.push_back(check_columns(context, &tables[i], i));
  return result;
}

int32_t check_num_ranks(const std::vector<Table>& tables) {
  if (tables.empty()) return 1;
  const Placement& first = tables.front().placement;
  for (const Table& table : tables) {
    SOK_CHECK(table.placement.num_ranks == first.num_ranks && table.placement.rank == first.rank, "table '", table.name,
              "' lies on ", table.placement.num_ranks, " ranks, seen from rank ", table.placement.rank, ", but table '",
              tables.front().name, "' on ", first.num_ranks, " ranks, seen from rank ", first.rank);
  }
  return first.num_ranks;
}

template <typename T>
std::vector<Lookup> check_lookups(const std::vector<T>& tables, int32_t num_lookups, const sok_lookup* lookups,
                                  Keys keys, Output output) {
  SOK_CHECK(num_lookups >= 0, "num_lookups is ", num_lookups, ", must not be negative");
  SOK_CHECK(num_lookups == 0 || lookups != nullptr, "lookups is NULL");
  std::vector<Lookup> result(static_cast<size_t>(num_lookups));
  int64_t entries = 0, bags = 0;
  for (int32_t i = 0; i < num_lookups; ++i) {
    const sok_lookup& from = lookups[i];
    Lookup& to = result[static_cast<size_t>(i)];
    check_struct(&from, sizeof(sok_lookup), {"lookups", i});
    SOK_CHECK(from.table >= 0 && static_cast<size_t>(from.table) < tables.size(), Label{"lookups", i, "table"}, " is ",
              from.table, ", must be in [0, ", tables.size(), ")");
    const TableId& table = tables[static_cast<size_t>(from.table)];
    const auto label = [&](const char* field) { return Label{"lookups", i, field, table.name}; };
    to.number = i;
    to.table = from.table;
    to.id = table;
    to.combiner = check_combiner(from.combiner, label("combiner"));
    to.generation = from.generation;
    to.located = keys == Keys::kSlots && !is_absent(from.slots);
    if (to.located) {
      to.keys = {checked_data<int64_t>(from.slots, label("slots"), SOK_INT64, {kAnySize}), from.slots.shape[0]};
    } else {
      to.keys = check_integers(from.keys, label("keys"), kAnySize, keys != Keys::kCounted);
    }
    const int64_t size = to.keys.size;
    if (keys == Keys::kLocated) to.slots = checked_data<int64_t>(from.slots, label("slots"), SOK_INT64, {size});
    to.num_bags = size;
    if (!is_absent(from.row_splits)) {
      to.row_splits = checked_data<int64_t>(from.row_splits, label("row_splits"), SOK_INT64, {kAnySize});
      to.num_bags = from.row_splits.shape[0] - 1;
      SOK_CHECK(to.num_bags >= 0, label("row_splits"), " is empty, must hold the number of bags plus one");
    }
    if (!is_absent(from.weights)) {
      to.weights = checked_data<float>(from.weights, label("weights"), SOK_FLOAT32, {size});
    }
    to.num_members = from.num_members;
    if (from.num_members != 0) {
      if (keys == Keys::kRead || keys == Keys::kLocated) to.members = check_members(from, i, tables);
      SOK_CHECK(to.num_members > 0, label("num_members"), " is ", to.num_members, ", must not be negative");
      SOK_CHECK(to.num_bags % to.num_members == 0, label("row_splits"), " are of ", to.num_bags, " bags, which ",
                to.num_members, " members cannot have as many of each");
    }
    if (output == Output::kWritten) {
      to.output = check_vectors(from.output, label("output"), to.num_bags, table.dimension, to.num_members);
    }
    to.first_entry = entries;
    SOK_CHECK(size <= kMaxEntries && to.num_bags <= kMaxEntries, label("keys"), ": ", size, " keys in ", to.num_bags,
              " bags; a call takes fewer than 2^31 of each");
    entries += size;
    bags += to.num_bags;
    SOK_CHECK(entries <= kMaxEntries && bags <= kMaxEntries, "the lookups have ", entries, " keys in ", bags,
              " bags together; a call takes fewer than 2^31 of each");
  }
  return result;
}

template std::vector<Lookup> check_lookups(const std::vector<Table>&, int32_t, const sok_lookup*, Keys, Output);
template std::vector<Lookup> check_lookups(const std::vector<Columns>&, int32_t, const sok_lookup*, Keys, Output);

std::vector<Vectors> check_output_gradients(const std::vector<Lookup>& lookups, const sok_tensor* output_gradients) {
  SOK_CHECK(lookups.empty() || output_gradients != nullptr, "output_gradients is NULL");
  std::vector<Vectors> result(lookups.size());
  for (size_t i = 0; i < lookups.size(); ++i) {
    if (is_absent(output_gradients[i])) continue;
    const TableId& table = lookups[i].id;
    const Label label{"output_gradients", static_cast<int64_t>(i), nullptr, table.name};
    result[i] = check_vectors(output_gradients[i], label, lookups[i].num_bags, table.dimension, lookups[i].num_members);
  }
  return result;
}

std::vector<Gradient> check_gradients(const Columns& table, int32_t num_gradients, const sok_gradient* gradients) {
  SOK_CHECK(num_gradients >= 0, "table '", table.name, "': num_gradients is ", num_gradients, ", must not be negative");
  SOK_CHECK(num_gradients == 0 || gradients != nullptr, "table '", table.name, "': gradients is NULL");
  std::vector<Gradient> result(static_cast<size_t>(num_gradients));
  int64_t entries = 0, rows = 0;
  for (int32_t i = 0; i < num_gradients; ++i) {
    const sok_gradient& from = gradients[i];
    Gradient& to = result[static_cast<size_t>(i)];
    const auto label = [&](const char* field) { return Label{"gradients", i, field, table.name}; };
    check_struct(&from, sizeof(sok_gradient), label(nullptr));
    SOK_CHECK((from.flags & ~SOK_GRADIENT_UNIQUE) == 0, label("flags"), " has unknown bits: ", from.flags);
    to.unique = (from.flags & SOK_GRADIENT_UNIQUE) != 0;
    to.slots = check_integers(from.slots, label("slots"), kAnySize);
    to.num_rows = to.slots.size;
    to.combiner = check_combiner(from.combiner, label("combiner"));
    if (!is_absent(from.row_splits)) {
      to.row_splits = checked_data<int64_t>(from.row_splits, label("row_splits"), SOK_INT64, {kAnySize});
      to.num_rows = from.row_splits.shape[0] - 1;
      SOK_CHECK(to.num_rows >= 0, label("row_splits"), " is empty, must hold the number of bags plus one");
    }
    if (!is_absent(from.weights)) {
      to.weights = checked_data<float>(from.weights, label("weights"), SOK_FLOAT32, {to.slots.size});
    }
    SOK_CHECK(from.num_members >= 0 && (from.num_members == 0 || to.num_rows % from.num_members == 0),
              label("num_members"), " is ", from.num_members, ", of which ", to.num_rows, " bags are no multiple");
    to.values = check_vectors(from.values, label("values"), to.num_rows, table.dimension, from.num_members);
    to.generation = from.generation;
    SOK_CHECK(to.slots.size <= kMaxEntries && to.num_rows <= kMaxEntries, label("slots"), ": ", to.slots.size,
              " slots in ", to.num_rows, " bags; a call takes fewer than 2^31 of each");
    entries += to.slots.size;
    rows += to.num_rows;
    SOK_CHECK(entries <= kMaxEntries && rows <= kMaxEntries, "table '", table.name, "': the gradients have ", entries,
              " slots in ", rows, " bags together; a call takes fewer than 2^31 of each");
  }
  return result;
}

}  // namespace sok
