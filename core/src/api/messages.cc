// SPDX-License-Identifier: Apache-2.0
// Entry points of sok/messages.h: reading count matrices, and messages as copies of their sections.
#include "sok/messages.h"

#include <limits>
#include <vector>

#include "api/dispatch.h"
#include "common/tensor.h"

namespace sok {
namespace {

// *sum += a * b
void add_product(int64_t* sum, int64_t a, int64_t b) {
  int64_t product = 0;
  SOK_CHECK(!__builtin_mul_overflow(a, b, &product) && !__builtin_add_overflow(*sum, product, sum),
            "the counts ask for more elements than fit the address space");
}

void check_layout(const sok_message_layout* layout) {
  SOK_CHECK(layout != nullptr, "layout is NULL");
  SOK_CHECK(layout->struct_size == sizeof(sok_message_layout), "layout.struct_size is ", layout->struct_size,
            ", must be ", sizeof(sok_message_layout));
  const auto in_range = [](int64_t number, const char* field) {
    SOK_CHECK(number >= 0 && number <= 1 << 20, "layout.", field, " is ", number, ", must be in [0, 2^20]");
  };
  in_range(layout->num_ranks, "num_ranks");
  in_range(layout->num_tables, "num_tables");
  in_range(layout->num_lookups, "num_lookups");
  const int64_t num_columns = layout->num_tables + int64_t{2} * layout->num_lookups;
  SOK_CHECK(layout->num_ranks <= 1 || layout->row_stride >= num_columns, "layout.row_stride is ", layout->row_stride,
            ", must be at least ", num_columns);
  SOK_CHECK((layout->num_tables == 0 || layout->dimensions != nullptr) &&
                (layout->num_lookups == 0 || layout->lookup_tables != nullptr) &&
                (layout->num_ranks == 0 || (layout->counts != nullptr && layout->row_counts != nullptr &&
                                            layout->sizes != nullptr && layout->parts != nullptr)),
            "an array of layout is NULL");
  for (int32_t i = 0; i < layout->num_lookups; ++i) {
    SOK_CHECK(layout->lookup_tables[i] >= 0 && layout->lookup_tables[i] < layout->num_tables, "layout.lookup_tables[",
              i, "] is ", layout->lookup_tables[i], ", must be in [0, ", layout->num_tables, ")");
  }
}

void read_layout(sok_message_layout* layout) {
  const int64_t num_ranks = layout->num_ranks, num_tables = layout->num_tables, num_lookups = layout->num_lookups;
  int64_t ends[SOK_NUM_SECTIONS] = {};
  int64_t floats = 0;
  layout->num_parts = 0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const int64_t* const row = layout->counts + rank * layout->row_stride;
    for (int64_t column = 0; column < num_tables + 2 * num_lookups; ++column) {
      SOK_CHECK(row[column] >= 0 && row[column] <= std::numeric_limits<int32_t>::max(),
                "counts must be in [0, 2^31), not ", row[column]);
    }
    int64_t starts[SOK_NUM_SECTIONS];
    for (int section = 0; section < SOK_NUM_SECTIONS; ++section) starts[section] = ends[section];
    const auto add = [&](int64_t table, int64_t lookup, int64_t keys, int64_t values) {
      const bool bags = lookup >= 0;
      const int key_section = bags ? SOK_SECTION_BAG_KEYS : SOK_SECTION_KEYS;
      layout->parts[layout->num_parts++] = {static_cast<int32_t>(rank),
                                            static_cast<int32_t>(table),
                                            static_cast<int32_t>(lookup),
                                            keys,
                                            values,
                                            ends[key_section],
                                            bags ? ends[SOK_SECTION_BAG_SPLITS] : -1,
                                            floats};
      ends[key_section] += keys;
      if (bags) ends[SOK_SECTION_BAG_SPLITS] += values + 1;
      add_product(&ends[bags ? SOK_SECTION_SUMS : SOK_SECTION_ROWS], values, layout->dimensions[table]);
      add_product(&floats, values, layout->dimensions[table]);
    };
    for (int64_t table = 0; table < num_tables; ++table) {
      layout->row_counts[rank * num_tables + table] = row[table];
      if (row[table] > 0) add(table, -1, row[table], row[table]);
    }
    for (int64_t lookup = 0; lookup < num_lookups; ++lookup) {
      const int64_t keys = row[num_tables + lookup], splits = row[num_tables + num_lookups + lookup];
      SOK_CHECK(splits > 0 || keys == 0, "lookup ", lookup, " has ", keys, " keys, but no row splits");
      if (splits > 0) add(layout->lookup_tables[lookup], lookup, keys, splits - 1);
    }
    for (int section = 0; section < SOK_NUM_SECTIONS; ++section) {
      layout->sizes[section * num_ranks + rank] = ends[section] - starts[section];
    }
  }
}

sok_tensor range(const sok_tensor& array, int64_t first, int64_t size) {
  if (is_absent(array)) return array;
  return {static_cast<int64_t*>(array.data) + first, array.dtype, 1, {size, 1}, 0};
}

void make_lookups(const sok_message_layout& layout, const sok_tensor& keys, const sok_tensor& slots,
                  const sok_tensor& splits, const sok_tensor& floats, sok_lookup* lookups) {
  int64_t totals[SOK_NUM_SECTIONS] = {};
  for (int32_t i = 0; i < SOK_NUM_SECTIONS * layout.num_ranks; ++i) totals[i / layout.num_ranks] += layout.sizes[i];
  const int64_t num_keys = totals[SOK_SECTION_KEYS];
  const auto checked = [](const sok_tensor& array, const char* what, int32_t dtype, int64_t size) {
    if (!is_absent(array)) check_tensor(array, {what}, {dtype}, {size});
  };
  checked(keys, "keys", SOK_INT64, num_keys + totals[SOK_SECTION_BAG_KEYS]);
  checked(slots, "slots", SOK_INT64, num_keys + totals[SOK_SECTION_BAG_KEYS]);
  checked(splits, "splits", SOK_INT64, totals[SOK_SECTION_BAG_SPLITS]);
  checked(floats, "floats", SOK_FLOAT32, totals[SOK_SECTION_ROWS] + totals[SOK_SECTION_SUMS]);
  SOK_CHECK(layout.num_parts == 0 || lookups != nullptr, "lookups is NULL");
  for (int32_t i = 0; i < layout.num_parts; ++i) {
    const sok_message_part& part = layout.parts[i];
    const bool bags = part.lookup >= 0;
    const int64_t first_key = part.first_key + (bags ? num_keys : 0);
    sok_lookup lookup = SOK_LOOKUP_INIT;
    lookup.table = part.table;
    lookup.keys = range(keys, first_key, part.num_keys);
    lookup.slots = range(slots, first_key, part.num_keys);
    if (bags) lookup.row_splits = range(splits, part.first_split, part.num_values + 1);
    if (!is_absent(floats)) {
      float* const data = static_cast<float*>(floats.data) + part.first_element;
      lookup.output = {data, SOK_FLOAT32, 2, {part.num_values, layout.dimensions[part.table]}, 0};
    }
    lookups[i] = lookup;
  }
}

// From the sections to the messages, or back.
std::vector<Copy> copies_of_sections(int32_t num_ranks, int32_t num_sections, const int64_t* sizes,
                                     const sok_tensor* sections, const sok_tensor& messages, bool join) {
  SOK_CHECK(num_ranks >= 0, "num_ranks is ", num_ranks, ", must not be negative");
  SOK_CHECK(num_sections >= 0, "num_sections is ", num_sections, ", must not be negative");
  SOK_CHECK(num_ranks == 0 || num_sections == 0 || (sizes != nullptr && sections != nullptr),
            "sizes or sections is NULL");
  check_tensor(messages, {"messages"}, {SOK_INT64, SOK_FLOAT32}, {kAnySize});
  const int64_t bytes = dtype_size(messages.dtype);
  int64_t total = 0;
  std::vector<char*> next(static_cast<size_t>(num_sections), nullptr);
  for (int32_t i = 0; i < num_sections; ++i) {
    int64_t size = 0;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      const int64_t own = sizes[i * int64_t{num_ranks} + rank];
      SOK_CHECK(own >= 0, "sizes[", i, "][", rank, "] is ", own, ", must not be negative");
      add_product(&size, own, 1);
    }
    add_product(&total, size, 1);
    if (size == 0) continue;
    check_tensor(sections[i], {"sections", i}, {messages.dtype}, {kAnySize});
    SOK_CHECK(sections[i].shape[0] >= size, "sections[", i, "] has ", sections[i].shape[0], " elements, must have ",
              size);
    next[static_cast<size_t>(i)] = static_cast<char*>(sections[i].data);
  }
  SOK_CHECK(messages.shape[0] == total, "messages has ", messages.shape[0], " elements, must have ", total);
  std::vector<Copy> copies;
  char* place = static_cast<char*>(messages.data);
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    for (int32_t i = 0; i < num_sections; ++i) {
      const int64_t size = sizes[i * int64_t{num_ranks} + rank] * bytes;
      if (size == 0) continue;
      char*& of_section = next[static_cast<size_t>(i)];
      if (of_section != place) copies.push_back(join ? Copy{of_section, place, size} : Copy{place, of_section, size});
      of_section += size;
      place += size;
    }
  }
  return copies;
}

}  // namespace
}  // namespace sok

using namespace sok;  // NOLINT: entry points only

extern "C" int sok_message_layout_read(sok_message_layout* layout) {
  return SOK_ENTRY({
    check_layout(layout);
    read_layout(layout);
  });
}

extern "C" int sok_message_lookups(const sok_message_layout* layout, sok_tensor keys, sok_tensor slots,
                                   sok_tensor splits, sok_tensor floats, sok_lookup* lookups) {
  return SOK_ENTRY({
    check_layout(layout);
    make_lookups(*layout, keys, slots, splits, floats, lookups);
  });
}

extern "C" int sok_messages_join(const sok_context* context, int32_t num_ranks, int32_t num_sections,
                                 const int64_t* sizes, const sok_tensor* sections, sok_tensor messages) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    SOK_DISPATCH(checked, copy, copies_of_sections(num_ranks, num_sections, sizes, sections, messages, true));
  });
}

extern "C" int sok_messages_split(const sok_context* context, int32_t num_ranks, int32_t num_sections,
                                  const int64_t* sizes, sok_tensor messages, const sok_tensor* sections) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    SOK_DISPATCH(checked, copy, copies_of_sections(num_ranks, num_sections, sizes, sections, messages, false));
  });
}
