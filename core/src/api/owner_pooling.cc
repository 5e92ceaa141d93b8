// SPDX-License-Identifier: Apache-2.0
// Entry points of sok/owner_pooling.h. gather_bags is gather_combine over what came from each rank.
#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "api/dispatch.h"
#include "common/bag_parts.h"
#include "common/tensor.h"

namespace sok {
namespace {

BagRouting check_bag_routing(const sok_bag_routing* routing, const std::vector<Lookup>& lookups, int64_t num_ranks,
                             const BagParts& parts) {
  SOK_CHECK(routing != nullptr, "routing is NULL");
  SOK_CHECK(routing->struct_size == sizeof(sok_bag_routing), "routing.struct_size is ", routing->struct_size,
            ", must be ", sizeof(sok_bag_routing));
  const auto label = [](const char* field) { return Label{"routing", -1, field}; };
  const int64_t entries = count_entries(lookups);
  BagRouting result = {};
  result.keys = checked_data<int64_t>(routing->keys, label("keys"), SOK_INT64, {entries});
  if (!is_absent(routing->weights)) {
    result.weights = checked_data<float>(routing->weights, label("weights"), SOK_FLOAT32, {entries});
  }
  const int64_t num_lookups = static_cast<int64_t>(lookups.size());
  result.counts = checked_data<int64_t>(routing->counts, label("counts"), SOK_INT64, {num_ranks, num_lookups});
  result.splits = checked_data<int64_t>(routing->splits, label("splits"), SOK_INT64, {parts.num_splits()});
  result.scales = checked_data<float>(routing->scales, label("scales"), SOK_FLOAT32, {parts.first_bag(lookups.size())});
  for (size_t i = 0; i < lookups.size() && result.weights == nullptr; ++i) {
    SOK_CHECK(lookups[i].weights == nullptr, "routing.weights is absent, but lookups[", i, "] has weights");
  }
  return result;
}

enum class Pooling { kByBytes, kAtOwner, kAtRequester };

Pooling read_pooling() {
  const char* const value = std::getenv("SOK_POOLING");
  const std::string_view text = value == nullptr ? "" : value;
  if (text.empty() || text == "auto") return Pooling::kByBytes;
  if (text == "owner") return Pooling::kAtOwner;
  SOK_CHECK(text == "requester", "SOK_POOLING is '", text, "', must be auto, owner or requester");
  return Pooling::kAtRequester;
}

// Rows are weighed by half: keys repeat in real batches, so fewer rows than keys travel.
bool saves_bytes(const Table& table, const Lookup& lookup, int32_t num_ranks) {
  const double dimension = static_cast<double>(table.dimension);
  const double parts = static_cast<double>(lookup.num_bags) * (table.placement.owner >= 0 ? 1 : num_ranks);
  const double rows = static_cast<double>(std::min(lookup.keys.size, table.placement.num_rows));
  const double bytes_of_parts = 8.0 * static_cast<double>(lookup.keys.size) + parts * (8.0 + 8.0 * dimension);
  return bytes_of_parts < 0.5 * rows * (8.0 + 8.0 * dimension);
}

// What came for each lookup from each source, as lookups of tables that are whole here.
struct Received {
  std::vector<Table> tables;
  std::vector<Lookup> lookups;
};

Received check_received(const std::vector<Table>& tables, int32_t num_lookups, const int32_t* lookup_tables,
                        int32_t num_sources, const int64_t* key_counts, const int64_t* bag_counts, sok_tensor slots,
                        sok_tensor splits, sok_tensor weights, sok_tensor sums) {
  SOK_CHECK(num_lookups >= 0, "num_lookups is ", num_lookups, ", must not be negative");
  SOK_CHECK(num_sources >= 0, "num_sources is ", num_sources, ", must not be negative");
  SOK_CHECK(num_lookups == 0 || lookup_tables != nullptr, "lookup_tables is NULL");
  SOK_CHECK(num_lookups == 0 || num_sources == 0 || (key_counts != nullptr && bag_counts != nullptr),
            "key_counts or bag_counts is NULL");
  std::vector<int32_t> of_lookup(static_cast<size_t>(num_lookups));
  for (int32_t i = 0; i < num_lookups; ++i) {
    SOK_CHECK(lookup_tables[i] >= 0 && static_cast<size_t>(lookup_tables[i]) < tables.size(), "lookup_tables[", i,
              "] is ", lookup_tables[i], ", must be in [0, ", tables.size(), ")");
    of_lookup[static_cast<size_t>(i)] = lookup_tables[i];
  }
  const int32_t rank = tables.empty() ? 0 : tables.front().placement.rank;
  const BagParts parts = received_bag_parts(tables, of_lookup, rank, num_sources, bag_counts);

  Received result;
  result.tables = tables;
  for (Table& table : result.tables) table.placement = {-1, 1, 0, table.num_slots};
  int64_t keys = 0, bags = 0;
  std::vector<int64_t> first_keys;
  for (int32_t source = 0; source < num_sources; ++source) {
    for (int32_t i = 0; i < num_lookups; ++i) {
      const Table& table = tables[static_cast<size_t>(lookup_tables[i])];
      const int64_t count = key_counts[static_cast<int64_t>(source) * num_lookups + i];
      SOK_CHECK(count >= 0 && count <= kMaxEntries - keys, "table '", table.name, "': key_counts[", source, "][", i,
                "] is ", count, "; a call takes fewer than 2^31 keys");
      SOK_CHECK(count == 0 || lives_on(table, rank), "table '", table.name, "': ", count, " keys came to rank ", rank,
                " from rank ", source, ", but the table lives on rank ", table.placement.owner);
      first_keys.push_back(keys);
      keys += count;
    }
  }
  const int64_t* const slots_data = checked_data<const int64_t>(slots, {"slots"}, SOK_INT64, {keys});
  const int64_t* const splits_data = checked_data<const int64_t>(splits, {"splits"}, SOK_INT64, {parts.num_splits()});
  const float* const weights_data =
      is_absent(weights) ? nullptr : checked_data<const float>(weights, {"weights"}, SOK_FLOAT32, {keys});
  float* const sums_data = checked_data<float>(sums, {"sums"}, SOK_FLOAT32, {parts.num_elements()});
  for (const BagPart& part : parts.parts()) {
    const size_t at = static_cast<size_t>(part.rank) * of_lookup.size() + static_cast<size_t>(part.lookup);
    bags += part.num_bags;
    SOK_CHECK(bags <= kMaxEntries, "bag_counts has ", bags, " bags; a call takes fewer than 2^31");
    Lookup lookup;
    lookup.table = of_lookup[static_cast<size_t>(part.lookup)];
    lookup.keys = {slots_data + first_keys[at], key_counts[at], true};
    lookup.row_splits = splits_data + part.first_split;
    lookup.weights = weights_data == nullptr ? nullptr : weights_data + first_keys[at];
    lookup.output = {sums_data + part.first_element, tables[static_cast<size_t>(lookup.table)].dimension};
    lookup.num_bags = part.num_bags;
    lookup.first_entry = first_keys[at];
    result.lookups.push_back(lookup);
  }
  return result;
}

}  // namespace
}  // namespace sok

using namespace sok;  // NOLINT: entry points only

extern "C" int sok_choose_pooling(const sok_context* context, int32_t num_tables, const sok_table* tables,
                                  int32_t num_lookups, const sok_lookup* lookups, int32_t* pooled) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_tables(checked, num_tables, tables, Rows::kIgnored);
    const int32_t num_ranks = check_num_ranks(views);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kCounted, Output::kIgnored);
    SOK_CHECK(num_lookups == 0 || pooled != nullptr, "pooled is NULL");
    const Pooling pooling = read_pooling();
    for (size_t i = 0; i < looks.size(); ++i) {
      const Table& table = views[static_cast<size_t>(looks[i].table)];
      const bool possible = looks[i].row_splits != nullptr && is_absent(lookups[i].weights) && !table.dynamic;
      const bool wanted = pooling == Pooling::kAtOwner ||
                          (pooling == Pooling::kByBytes && possible && saves_bytes(table, looks[i], num_ranks));
      pooled[i] = possible && wanted ? 1 : 0;
    }
  });
}

extern "C" int sok_route_bags(const sok_context* context, int32_t num_tables, const sok_table* tables,
                              int32_t num_lookups, const sok_lookup* lookups, const sok_bag_routing* routing) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_tables(checked, num_tables, tables, Rows::kIgnored);
    const int32_t num_ranks = check_num_ranks(views);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kRead, Output::kIgnored);
    const BagParts parts(views, looks, num_ranks);
    const BagRouting out = check_bag_routing(routing, looks, num_ranks, parts);
    refuse_dynamic(views, "route_bags");
    SOK_DISPATCH(checked, route_bags, views, looks, parts, out);
  });
}

extern "C" int sok_gather_bags(const sok_context* context, int32_t num_tables, const sok_table* tables,
                               int32_t num_lookups, const int32_t* lookup_tables, int32_t num_sources,
                               const int64_t* key_counts, const int64_t* bag_counts, sok_tensor slots,
                               sok_tensor splits, sok_tensor weights, sok_tensor sums) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_tables(checked, num_tables, tables, Rows::kUsed);
    check_num_ranks(views);
    refuse_dynamic(views, "gather_bags");
    const Received received = check_received(views, num_lookups, lookup_tables, num_sources, key_counts, bag_counts,
                                             slots, splits, weights, sums);
    SOK_DISPATCH(checked, gather_combine, received.tables, received.lookups);
  });
}

extern "C" int sok_combine_bags(const sok_context* context, int32_t num_tables, const sok_table* tables,
                                int32_t num_lookups, const sok_lookup* lookups, sok_tensor scales, sok_tensor sums) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_tables(checked, num_tables, tables, Rows::kIgnored);
    const int32_t num_ranks = check_num_ranks(views);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kCounted, Output::kWritten);
    const BagParts parts(views, looks, num_ranks);
    const float* scales_data =
        checked_data<const float>(scales, {"scales"}, SOK_FLOAT32, {parts.first_bag(looks.size())});
    const float* sums_data = checked_data<const float>(sums, {"sums"}, SOK_FLOAT32, {parts.num_elements()});
    SOK_DISPATCH(checked, combine_bags, views, looks, parts, scales_data, sums_data);
  });
}

extern "C" int sok_spread_bags(const sok_context* context, int32_t num_tables, const sok_table* tables,
                               int32_t num_lookups, const sok_lookup* lookups, const sok_tensor* output_gradients,
                               sok_tensor scales, sok_tensor gradients) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_tables(checked, num_tables, tables, Rows::kIgnored);
    const int32_t num_ranks = check_num_ranks(views);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kCounted, Output::kIgnored);
    const std::vector<Vectors> outputs = check_output_gradients(views, looks, output_gradients);
    const BagParts parts(views, looks, num_ranks);
    const float* scales_data =
        checked_data<const float>(scales, {"scales"}, SOK_FLOAT32, {parts.first_bag(looks.size())});
    float* out = checked_data<float>(gradients, {"gradients"}, SOK_FLOAT32, {parts.num_elements()});
    SOK_DISPATCH(checked, spread_bags, views, looks, parts, outputs, scales_data, out);
  });
}

extern "C" int sok_copy(const sok_context* context, int32_t num_copies, const sok_tensor* sources,
                        const sok_tensor* targets) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    SOK_CHECK(num_copies >= 0, "num_copies is ", num_copies, ", must not be negative");
    SOK_CHECK(num_copies == 0 || (sources != nullptr && targets != nullptr), "sources or targets is NULL");
    std::vector<Copy> copies;
    for (int32_t i = 0; i < num_copies; ++i) {
      SOK_CHECK(sources[i].dtype >= SOK_INT32 && sources[i].dtype <= SOK_UINT8, "sources[", i, "].dtype is ",
                sources[i].dtype, ", which is no dtype");
      check_tensor(sources[i], {"sources", i}, {sources[i].dtype}, {kAnySize});
      check_tensor(targets[i], {"targets", i}, {sources[i].dtype}, {sources[i].shape[0]});
      const int64_t bytes = sources[i].shape[0] * dtype_size(sources[i].dtype);
      if (bytes > 0) copies.push_back({sources[i].data, targets[i].data, bytes});
    }
    SOK_DISPATCH(checked, copy, copies);
  });
}
