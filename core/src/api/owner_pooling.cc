// SPDX-License-Identifier: Apache-2.0
// Entry points of sok/owner_pooling.h.
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
  const int64_t num_lookups = static_cast<int64_t>(lookups.size());
  result.counts = checked_data<int64_t>(routing->counts, label("counts"), SOK_INT64, {num_ranks, num_lookups});
  result.splits = checked_data<int64_t>(routing->splits, label("splits"), SOK_INT64, {parts.num_splits()});
  result.scales = checked_data<float>(routing->scales, label("scales"), SOK_FLOAT32, {parts.first_bag(lookups.size())});
  for (size_t i = 0; i < lookups.size(); ++i) {
    SOK_CHECK(lookups[i].weights == nullptr, Label{"lookups", static_cast<int64_t>(i), "weights", lookups[i].id.name},
              " must be absent: lookups with weights are pooled at the requester");
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
  const int64_t num_rows = table.placement.num_rows;
  const double rows =
      static_cast<double>(num_rows == Placement::kAnyKey ? lookup.keys.size : std::min(lookup.keys.size, num_rows));
  const double bytes_of_parts = 8.0 * static_cast<double>(lookup.keys.size) + parts * (8.0 + 8.0 * dimension);
  return bytes_of_parts < 0.5 * rows * (8.0 + 8.0 * dimension);
}

}  // namespace
}  // namespace sok

using namespace sok;  // NOLINT: entry points only

extern "C" int sok_choose_pooling(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                                  int32_t num_lookups, const sok_lookup* lookups, int32_t* pooled) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_placements(checked, num_tables, tables);
    const int32_t num_ranks = check_num_ranks(views);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kCounted, Output::kIgnored);
    SOK_CHECK(num_lookups == 0 || pooled != nullptr, "pooled is NULL");
    const Pooling pooling = read_pooling();
    for (size_t i = 0; i < looks.size(); ++i) {
      const Table& table = views[static_cast<size_t>(looks[i].table)];
      const bool possible = looks[i].row_splits != nullptr && is_absent(lookups[i].weights);
      const bool wanted = pooling == Pooling::kAtOwner ||
                          (pooling == Pooling::kByBytes && possible && saves_bytes(table, looks[i], num_ranks));
      pooled[i] = possible && wanted ? 1 : 0;
    }
  });
}

extern "C" int sok_route_bags(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                              int32_t num_lookups, const sok_lookup* lookups, const sok_bag_routing* routing) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_placements(checked, num_tables, tables);
    const int32_t num_ranks = check_num_ranks(views);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kRead, Output::kIgnored);
    const BagParts parts(views, looks, num_ranks);
    const BagRouting out = check_bag_routing(routing, looks, num_ranks, parts);
    SOK_DISPATCH(checked, route_bags, views, looks, parts, out);
  });
}

extern "C" int sok_combine_bags(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                                int32_t num_lookups, const sok_lookup* lookups, sok_tensor scales, sok_tensor sums) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_placements(checked, num_tables, tables);
    const int32_t num_ranks = check_num_ranks(views);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kCounted, Output::kWritten);
    const BagParts parts(views, looks, num_ranks);
    const float* scales_data =
        checked_data<const float>(scales, {"scales"}, SOK_FLOAT32, {parts.first_bag(looks.size())});
    const float* sums_data = checked_data<const float>(sums, {"sums"}, SOK_FLOAT32, {parts.num_elements()});
    SOK_DISPATCH(checked, combine_bags, looks, parts, scales_data, sums_data);
  });
}

extern "C" int sok_spread_bags(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                               int32_t num_lookups, const sok_lookup* lookups, const sok_tensor* output_gradients,
                               sok_tensor scales, sok_tensor gradients) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_placements(checked, num_tables, tables);
    const int32_t num_ranks = check_num_ranks(views);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kCounted, Output::kIgnored);
    const std::vector<Vectors> outputs = check_output_gradients(looks, output_gradients);
    const BagParts parts(views, looks, num_ranks);
    const float* scales_data =
        checked_data<const float>(scales, {"scales"}, SOK_FLOAT32, {parts.first_bag(looks.size())});
    float* out = checked_data<float>(gradients, {"gradients"}, SOK_FLOAT32, {parts.num_elements()});
    SOK_DISPATCH(checked, spread_bags, looks, parts, outputs, scales_data, out);
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
