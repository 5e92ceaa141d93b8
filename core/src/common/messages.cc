// SPDX-License-Identifier: Apache-2.0
#include "common/messages.h"

#include <limits>
#include <utility>

#include "common/status.h"

namespace sok {
namespace {

constexpr int64_t kMaxThings = 1 << 20;  // ranks, tables or lookups, so that products of them fit

void check_messages(const sok_messages* messages) {
  SOK_CHECK(messages != nullptr, "messages is NULL");
  SOK_CHECK(messages->struct_size == sizeof(sok_messages), "messages.struct_size is ", messages->struct_size,
            ", must be ", sizeof(sok_messages));
  const auto check_number = [](int64_t number, const char* field) {
    SOK_CHECK(number >= 0 && number <= kMaxThings, "messages.", field, " is ", number, ", must be in [0, ", kMaxThings,
              "]");
  };
  check_number(messages->num_ranks, "num_ranks");
  check_number(messages->num_tables, "num_tables");
  check_number(messages->num_lookups, "num_lookups");
  const int64_t num_columns = messages->num_tables + int64_t{2} * messages->num_lookups;
  SOK_CHECK(messages->row_stride >= num_columns && messages->row_stride <= 4 * kMaxThings, "messages.row_stride is ",
            messages->row_stride, ", must be at least ", num_columns, " and at most ", 4 * kMaxThings);
  SOK_CHECK((messages->num_tables == 0 || messages->dimensions != nullptr) &&
                (messages->num_lookups == 0 || messages->lookup_tables != nullptr) &&
                (messages->num_ranks == 0 || num_columns == 0 || messages->counts != nullptr),
            "messages.dimensions, lookup_tables or counts is NULL");
  for (int32_t i = 0; i < messages->num_lookups; ++i) {
    SOK_CHECK(messages->lookup_tables[i] >= 0 && messages->lookup_tables[i] < messages->num_tables,
              "messages.lookup_tables[", i, "] is ", messages->lookup_tables[i], ", must be in [0, ",
              messages->num_tables, ")");
  }
}

void check_call(const std::vector<Table>& tables, const std::vector<Lookup>& lookups, const sok_messages& messages) {
  const int32_t num_ranks = check_num_ranks(tables);
  SOK_CHECK(messages.num_ranks == num_ranks, "messages.num_ranks is ", messages.num_ranks, ", must be ", num_ranks);
  SOK_CHECK(static_cast<size_t>(messages.num_tables) == tables.size(), "messages.num_tables is ", messages.num_tables,
            ", must be ", tables.size());
  SOK_CHECK(messages.num_lookups == 0 || static_cast<size_t>(messages.num_lookups) == lookups.size(),
            "messages.num_lookups is ", messages.num_lookups, ", must be ", lookups.size());
  for (size_t t = 0; t < tables.size(); ++t) {
    SOK_CHECK(messages.dimensions[t] == tables[t].dimension, "table '", tables[t].name, "': messages.dimensions[", t,
              "] is ", messages.dimensions[t], ", must be ", tables[t].dimension);
  }
  for (int32_t i = 0; i < messages.num_lookups; ++i) {
    SOK_CHECK(messages.lookup_tables[i] == lookups[static_cast<size_t>(i)].table, "messages.lookup_tables[", i, "] is ",
              messages.lookup_tables[i], ", must be ", lookups[static_cast<size_t>(i)].table);
  }
}

}  // namespace

std::vector<MessagePart> read_parts(const sok_messages* messages) {
  check_messages(messages);
  const int64_t num_tables = messages->num_tables, num_lookups = messages->num_lookups;
  std::vector<MessagePart> parts;
  int64_t key = 0, element = 0;
  for (int32_t rank = 0; rank < messages->num_ranks; ++rank) {
    const int64_t* const row = messages->counts + rank * messages->row_stride;
    const int64_t *const bag_keys = row + num_tables, *const bag_splits = bag_keys + num_lookups;
    for (const int64_t* count = row; count < bag_splits + num_lookups; ++count) {
      SOK_CHECK(*count >= 0 && *count <= std::numeric_limits<int32_t>::max(), "counts must be in [0, 2^31), not ",
                *count);
    }
    const auto add = [&](int64_t table, int32_t lookup, int64_t keys, int64_t values) {
      parts.push_back({rank, static_cast<int32_t>(table), lookup, keys, values, key, -1, element});
      key += keys;
      int64_t elements = 0;
      SOK_CHECK(!__builtin_mul_overflow(values, messages->dimensions[table], &elements) && elements >= 0 &&
                    !__builtin_add_overflow(element, elements, &element),
                "the counts ask for more elements than fit the address space");
    };
    for (int64_t table = 0; table < num_tables; ++table) {
      if (row[table] > 0) add(table, -1, row[table], row[table]);
    }
    const size_t first_bags = parts.size();
    for (int32_t lookup = 0; lookup < num_lookups; ++lookup) {
      SOK_CHECK(bag_splits[lookup] > 0 || bag_keys[lookup] == 0, "lookup ", lookup, " has ", bag_keys[lookup],
                " keys, but no row splits");
      if (bag_splits[lookup] == 0) continue;
      add(messages->lookup_tables[lookup], lookup, bag_keys[lookup], bag_splits[lookup] - 1);
    }
    for (size_t part = first_bags; part < parts.size(); ++part) {
      parts[part].first_split = key;
      key += parts[part].num_values + 1;
    }
  }
  return parts;
}

SplitLookups::SplitLookups(const std::vector<Lookup>& lookups, const int32_t* pooled) {
  for (size_t i = 0; i < lookups.size(); ++i) {
    std::vector<Lookup>& target = pooled != nullptr && pooled[i] != 0 ? at_owner : at_requester;
    const int64_t first_entry = count_entries(target);
    target.push_back(lookups[i]);
    target.back().first_entry = first_entry;
  }
}

Request read_request(const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
                     const sok_messages* messages) {
  const int32_t num_ranks = check_num_ranks(tables);
  if (messages == nullptr) return {{}, SplitLookups(lookups, nullptr), BagParts(tables, {}, num_ranks)};
  const std::vector<MessagePart> read = read_parts(messages);
  check_call(tables, lookups, *messages);
  std::vector<int64_t> counts(static_cast<size_t>(num_ranks) * tables.size(), 0), rows(num_ranks, 0);
  std::vector<int32_t> pooled(lookups.size(), 0);
  size_t num_bag_parts = 0;
  for (const MessagePart& part : read) {
    const auto rank = static_cast<size_t>(part.rank), table = static_cast<size_t>(part.table);
    if (part.lookup < 0) {
      counts[rank * tables.size() + table] = part.num_keys;
      rows[rank] += part.num_values * tables[table].dimension;
      continue;
    }
    const Lookup& lookup = lookups[static_cast<size_t>(part.lookup)];
    pooled[static_cast<size_t>(part.lookup)] = 1;
    SOK_CHECK(part.num_values == lookup.num_bags && tables[table].placement.lives_on(part.rank), "table '",
              tables[table].name, "': counts ask rank ", part.rank, " for ", part.num_values, " bags of lookup ",
              part.lookup, ", which has ", lookup.num_bags, " there");
    ++num_bag_parts;
  }
  SplitLookups split(lookups, pooled.data());
  BagParts parts(tables, split.at_owner, num_ranks, rows);
  SOK_CHECK(parts.parts().size() == num_bag_parts, "counts ask not all ranks for the bags of a lookup");
  return {std::move(counts), std::move(split), std::move(parts)};
}

}  // namespace sok
