// SPDX-License-Identifier: Apache-2.0
#include "common/call.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

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

}  // namespace

bool has_error_record(const sok_context& context) {
  return context.device.type == SOK_CUDA && context.struct_size == sizeof(sok_context) && context.errors != nullptr;
}

const sok_context& check_context(const sok_context* context) {
  // The first version of the struct ended before `errors`.
  constexpr size_t kFirstSize = offsetof(sok_context, errors);
  check_struct(context, context != nullptr && context->struct_size == kFirstSize ? kFirstSize : sizeof(sok_context),
               {"context"});
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

Table check_table(const sok_context& context, const sok_table* table, Rows rows) {
  check_struct(table, sizeof(sok_table), {"table"});
  Table result;
  result.name = table->name != nullptr ? table->name : "table";
  const char* name = result.name;
  if (has_error_record(context)) result.number = context.errors->keeper->names.number_of(name);
  SOK_CHECK(table->kind == SOK_TABLE_STATIC || table->kind == SOK_TABLE_DYNAMIC, "table '", name, "': kind is ",
            table->kind, ", must be SOK_TABLE_STATIC or SOK_TABLE_DYNAMIC");
  SOK_CHECK(table->num_ranks >= 1, "table '", name, "': num_ranks is ", table->num_ranks, ", must be at least 1");
  SOK_CHECK(table->rank >= 0 && table->rank < table->num_ranks, "table '", name, "': rank is ", table->rank,
            ", must be in [0, ", table->num_ranks, ")");
  SOK_CHECK(table->owner >= -1 && table->owner < table->num_ranks, "table '", name, "': owner is ", table->owner,
            ", must be -1 or a rank in [0, ", table->num_ranks, ")");
  SOK_CHECK(table->dimension >= 1, "table '", name, "': dimension is ", table->dimension, ", must be at least 1");
  SOK_CHECK(table->dimension <= INT32_MAX, "table '", name, "': dimension ", table->dimension, " is too large");
  result.dynamic = table->kind == SOK_TABLE_DYNAMIC;
  SOK_CHECK(result.dynamic || table->num_rows >= 1, "table '", name, "': num_rows is ", table->num_rows,
            ", must be at least 1");
  result.placement = {table->owner, table->num_ranks, table->rank, result.dynamic ? 0 : table->num_rows};
  result.dimension = table->dimension;
  result.index = table->index;
  if (rows == Rows::kUsed) {
    const int64_t slots = result.dynamic ? kAnySize : result.placement.local_rows(table->rank);
    result.weight = check_floats(table->weight, {"weight", -1, nullptr, name}, {slots, result.dimension});
    result.num_slots = table->weight.shape[0];
  }
  return result;
}

std::vector<Table> check_tables(const sok_context& context, int32_t num_tables, const sok_table* tables, Rows rows) {
  SOK_CHECK(num_tables >= 0, "num_tables is ", num_tables, ", must not be negative");
  SOK_CHECK(num_tables == 0 || tables != nullptr, "tables is NULL");
  std::vector<Table> result;
  result.reserve(static_cast<size_t>(num_tables));
  for (int32_t i = 0; i < num_tables; ++i) {
    result.push_back(check_table(context, &tables[i], rows));
    if (!has_error_record(context)) result.back().number = i;
  }
  return result;
}

void refuse_dynamic(const std::vector<Table>& tables, const char* stage) {
  for (const Table& table : tables) {
    SOK_CHECK_STATUS(SOK_UNIMPLEMENTED, !table.dynamic, "table '", table.name, "': ", stage,
                     " does not serve dynamic tables in this version");
  }
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

std::vector<Lookup> check_lookups(const std::vector<Table>& tables, int32_t num_lookups, const sok_lookup* lookups,
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
    const Table& table = tables[static_cast<size_t>(from.table)];
    const auto label = [&](const char* field) { return Label{"lookups", i, field, table.name}; };
    to.table = from.table;
    to.combiner = check_combiner(from.combiner, label("combiner"));
    to.keys = check_integers(from.keys, label("keys"), kAnySize, keys == Keys::kRead);
    SOK_CHECK(table.dynamic || is_absent(from.slots), label("slots"), " must be absent: the table is static");
    const int64_t size = to.keys.size;
    to.num_bags = size;
    if (!is_absent(from.row_splits)) {
      to.row_splits = checked_data<int64_t>(from.row_splits, label("row_splits"), SOK_INT64, {kAnySize});
      to.num_bags = from.row_splits.shape[0] - 1;
      SOK_CHECK(to.num_bags >= 0, label("row_splits"), " is empty, must hold the number of bags plus one");
    }
    if (!is_absent(from.weights)) {
      to.weights = checked_data<float>(from.weights, label("weights"), SOK_FLOAT32, {size});
    }
    if (output == Output::kWritten) {
      to.output = check_vectors(from.output, label("output"), to.num_bags, table.dimension);
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

std::vector<Vectors> check_output_gradients(const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
                                            const sok_tensor* output_gradients) {
  SOK_CHECK(lookups.empty() || output_gradients != nullptr, "output_gradients is NULL");
  std::vector<Vectors> result(lookups.size());
  for (size_t i = 0; i < lookups.size(); ++i) {
    if (is_absent(output_gradients[i])) continue;
    const Table& table = tables[static_cast<size_t>(lookups[i].table)];
    const Label label{"output_gradients", static_cast<int64_t>(i), nullptr, table.name};
    result[i] = check_vectors(output_gradients[i], label, lookups[i].num_bags, table.dimension);
  }
  return result;
}

Totals check_counts(const std::vector<Table>& tables, int32_t num_ranks, const int64_t* counts) {
  SOK_CHECK(num_ranks >= 0, "num_sources is ", num_ranks, ", must not be negative");
  SOK_CHECK(num_ranks == 0 || tables.empty() || counts != nullptr, "counts is NULL");
  Totals totals;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    for (size_t t = 0; t < tables.size(); ++t) {
      const int64_t count = counts[static_cast<size_t>(rank) * tables.size() + t];
      int64_t elements = 0;
      SOK_CHECK(count >= 0, "table '", tables[t].name, "': counts[", rank, "][", t, "] is ", count);
      SOK_CHECK(!__builtin_add_overflow(totals.rows, count, &totals.rows) &&
                    !__builtin_mul_overflow(count, tables[t].dimension, &elements) &&
                    !__builtin_add_overflow(totals.elements, elements, &totals.elements),
                "table '", tables[t].name, "': counts[", rank, "][", t, "] is ", count,
                "; the sum does not fit the address space");
    }
  }
  return totals;
}

std::vector<Gradient> check_gradients(const Table& table, int32_t num_gradients, const sok_gradient* gradients) {
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
    const Vectors values = check_vectors(from.values, label("values"), to.num_rows, table.dimension);
    to.values = values.data;
    to.value_stride = values.stride;
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
