// SPDX-License-Identifier: Apache-2.0
// Entry points of sok/messages.h.
#include "common/messages.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <string_view>

#include "api/dispatch.h"
#include "common/tensor.h"

namespace sok {
namespace {

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

// Elements [first, first + size) of an array of rank 1; absent of one that is.
sok_tensor range(const sok_tensor& array, int64_t first, int64_t size) {
  if (is_absent(array)) return array;
  char* const data = static_cast<char*>(array.data) + first * dtype_size(array.dtype);
  return {data, array.dtype, 1, {size, 1}, 0};
}

// The outputs of sok_messages_read.
struct Totals {
  Totals(const std::vector<MessagePart>& parts, const sok_messages& messages) {
    num_parts = static_cast<int32_t>(parts.size());
    for (const MessagePart& part : parts) {
      const int64_t splits = part.lookup < 0 ? 0 : part.num_values + 1;
      num_bag_splits += splits;
      num_keys += part.num_keys + splits;
      num_floats += part.num_values * messages.dimensions[part.table];
    }
  }

  int32_t num_parts;
  int64_t num_keys = 0, num_bag_splits = 0, num_floats = 0;
};

// The parts of messages that sok_messages_read has read before.
std::vector<MessagePart> read_again(const sok_messages* messages) {
  std::vector<MessagePart> parts = read_parts(messages);
  const Totals totals(parts, *messages);
  SOK_CHECK(messages->num_parts == totals.num_parts && messages->num_keys == totals.num_keys &&
                messages->num_bag_splits == totals.num_bag_splits && messages->num_floats == totals.num_floats,
            "messages is not as sok_messages_read left it");
  return parts;
}

// What came to an owner, as views.
struct CameViews {
  sok_tensor keys, slots, row_splits, values;
};

class Came {
 public:
  Came(const sok_messages* messages, const sok_tensor& keys, const sok_tensor& slots, const sok_tensor& floats)
      : parts(read_again(messages)), messages_(*messages), keys_(keys), slots_(slots), floats_(floats) {
    if (!is_absent(keys)) check_tensor(keys, {"keys"}, {SOK_INT64, SOK_INT32}, {messages->num_keys});
    SOK_CHECK((!is_absent(keys) && keys.dtype == SOK_INT64) || messages->num_bag_splits == 0,
              "keys must be given as int64: there are row splits among them");
    check_tensor(slots, {"slots"}, {SOK_INT64}, {messages->num_keys});
    if (!is_absent(floats)) check_tensor(floats, {"floats"}, {SOK_FLOAT32}, {messages->num_floats});
  }

  CameViews operator[](const MessagePart& part) const {
    const int64_t dimension = messages_.dimensions[part.table];
    const sok_tensor none = SOK_NO_TENSOR;
    CameViews views = {range(keys_, part.first_key, part.num_keys), range(slots_, part.first_key, part.num_keys),
                       part.lookup < 0 ? none : range(keys_, part.first_split, part.num_values + 1),
                       range(floats_, part.first_element, part.num_values * dimension)};
    if (!is_absent(floats_)) {
      views.values.rank = 2;
      views.values.shape[0] = part.num_values;
      views.values.shape[1] = dimension;
    }
    return views;
  }

  const std::vector<MessagePart> parts;

 private:
  const sok_messages& messages_;
  const sok_tensor keys_, slots_, floats_;
};

// Sections of routing -> their places in messages; sections that follow each other in both are one copy.
class Join {
 public:
  explicit Join(int64_t* messages) : messages_(messages) {}

  // The next `size` elements of a section go to `place`.
  void add(const sok_tensor& section, const char* name, int64_t* next, int64_t place, int64_t size) {
    if (size == 0) return;
    const Label label{"routing", -1, name};
    int64_t* const data = checked_data<int64_t>(section, label, SOK_INT64, {kAnySize}) + *next;
    *next += size;
    SOK_CHECK(section.shape[0] >= *next, label, " has ", section.shape[0], " elements, must have ", *next, " at least");
    const int64_t bytes = size * dtype_size(SOK_INT64);
    if (data == source_end_ && messages_ + place == target_end_) {
      copies.back().bytes += bytes;
    } else {
      copies.push_back({data, messages_ + place, bytes});
    }
    source_end_ = data + size, target_end_ = messages_ + place + size;
  }

  std::vector<Copy> copies;

 private:
  int64_t *const messages_, *source_end_ = nullptr, *target_end_ = nullptr;
};

}  // namespace
}  // namespace sok

using namespace sok;  // NOLINT: entry points only

extern "C" int sok_split_batch(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                               int32_t num_lookups, const sok_lookup* lookups, sok_batch* batch) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<Table> views = check_placements(checked, num_tables, tables);
    const int32_t num_ranks = check_num_ranks(views);
    const std::vector<Lookup> looks = check_lookups(views, num_lookups, lookups, Keys::kCounted, Output::kIgnored);
    SOK_CHECK(batch != nullptr, "batch is NULL");
    SOK_CHECK(batch->struct_size == sizeof(sok_batch), "batch.struct_size is ", batch->struct_size, ", must be ",
              sizeof(sok_batch));
    SOK_CHECK(num_lookups == 0 || batch->pooled != nullptr, "batch.pooled is NULL");
    const Pooling pooling = read_pooling();
    for (size_t i = 0; i < looks.size(); ++i) {
      const Table& table = views[static_cast<size_t>(looks[i].table)];
      const bool possible = looks[i].row_splits != nullptr && is_absent(lookups[i].weights);
      const bool wanted = pooling == Pooling::kAtOwner ||
                          (pooling == Pooling::kByBytes && possible && saves_bytes(table, looks[i], num_ranks));
      batch->pooled[i] = possible && wanted ? 1 : 0;
    }
    const SplitLookups split(looks, batch->pooled);
    batch->num_entries = count_entries(split.at_requester);
    batch->num_bag_keys = count_entries(split.at_owner);
    batch->num_bag_splits = BagParts(views, split.at_owner, num_ranks).num_splits();
  });
}

extern "C" int sok_messages_read(sok_messages* messages, int64_t* keys, int64_t* floats) {
  return SOK_ENTRY({
    const std::vector<MessagePart> parts = read_parts(messages);
    const Totals totals(parts, *messages);
    if (keys != nullptr) std::fill(keys, keys + messages->num_ranks, 0);
    if (floats != nullptr) std::fill(floats, floats + messages->num_ranks, 0);
    for (const MessagePart& part : parts) {
      if (keys != nullptr) keys[part.rank] += part.num_keys + (part.lookup < 0 ? 0 : part.num_values + 1);
      if (floats != nullptr) floats[part.rank] += part.num_values * messages->dimensions[part.table];
    }
    messages->num_parts = totals.num_parts;
    messages->num_keys = totals.num_keys;
    messages->num_bag_splits = totals.num_bag_splits;
    messages->num_floats = totals.num_floats;
  });
}

extern "C" int sok_join_keys(const sok_context* context, const sok_messages* messages, const sok_routing* routing,
                             sok_tensor keys) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const std::vector<MessagePart> parts = read_again(messages);
    SOK_CHECK(routing != nullptr, "routing is NULL");
    SOK_CHECK(routing->struct_size == sizeof(sok_routing), "routing.struct_size is ", routing->struct_size,
              ", must be ", sizeof(sok_routing));
    Join join(checked_data<int64_t>(keys, {"keys"}, SOK_INT64, {messages->num_keys}));
    int64_t unique = 0;
    int64_t key = 0;
    int64_t split = 0;
    for (const MessagePart& part : parts) {
      if (part.lookup < 0) join.add(routing->keys, "keys", &unique, part.first_key, part.num_keys);
    }
    for (const MessagePart& part : parts) {
      if (part.lookup >= 0) join.add(routing->bag_keys, "bag_keys", &key, part.first_key, part.num_keys);
    }
    for (const MessagePart& part : parts) {
      if (part.lookup >= 0) join.add(routing->bag_splits, "bag_splits", &split, part.first_split, part.num_values + 1);
    }
    SOK_DISPATCH(checked, copy, join.copies);
  });
}

extern "C" int sok_owner_lookups(const sok_messages* messages, sok_tensor keys, sok_tensor slots, sok_tensor floats,
                                 sok_lookup* lookups) {
  return SOK_ENTRY({
    const Came came(messages, keys, slots, floats);
    SOK_CHECK(came.parts.empty() || lookups != nullptr, "lookups is NULL");
    for (const MessagePart& part : came.parts) {
      const CameViews views = came[part];
      sok_lookup lookup = SOK_LOOKUP_INIT;
      lookup.table = part.table;
      lookup.keys = views.keys;
      lookup.slots = views.slots;
      lookup.row_splits = views.row_splits;
      lookup.output = views.values;
      *lookups++ = lookup;
    }
  });
}

extern "C" int sok_owner_gradients(const sok_messages* messages, sok_tensor keys, sok_tensor slots, sok_tensor floats,
                                   sok_gradient* gradients, int64_t* first) {
  return SOK_ENTRY({
    const Came came(messages, keys, slots, floats);
    SOK_CHECK(!is_absent(floats), "floats must be given");
    SOK_CHECK(came.parts.empty() || gradients != nullptr, "gradients is NULL");
    SOK_CHECK(first != nullptr, "first is NULL");
    std::vector<int64_t> next(static_cast<size_t>(messages->num_tables) + 1, 0);
    for (const MessagePart& part : came.parts) ++next[static_cast<size_t>(part.table) + 1];
    std::partial_sum(next.begin(), next.end(), next.begin());
    std::copy(next.begin(), next.end(), first);
    for (const MessagePart& part : came.parts) {
      const CameViews views = came[part];
      sok_gradient gradient = SOK_GRADIENT_INIT;
      if (part.lookup < 0) gradient.flags = SOK_GRADIENT_UNIQUE;  // route removed the duplicates
      gradient.slots = views.slots;
      gradient.values = views.values;
      gradient.row_splits = views.row_splits;
      gradients[next[static_cast<size_t>(part.table)]++] = gradient;
    }
  });
}
