// SPDX-License-Identifier: Apache-2.0
#include "message_counts.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <limits>
#include <numeric>

#include "context.h"
#include "sok/owner_pooling.h"
#include "status.h"
#include "views.h"

namespace sok_torch {
namespace {

int64_t sum(const std::vector<int64_t>& numbers) { return std::accumulate(numbers.begin(), numbers.end(), int64_t{0}); }

// The arrays that have elements.
std::vector<size_t> used(const Sections& sections) {
  std::vector<size_t> result;
  for (size_t i = 0; i < sections.size(); ++i) {
    if (sum(sections[i]) > 0) result.push_back(i);
  }
  return result;
}

at::Tensor first_elements(const at::Tensor& array, int64_t size) {
  TORCH_CHECK_VALUE(array.defined() && array.dim() == 1 && array.size(0) >= size,
                    "an array of a message has fewer than ", size, " elements");
  return array.size(0) == size ? array : array.narrow(0, 0, size);
}

// Copies between messages and the arrays that are in `kinds`.
void copy_sections(const at::Tensor& messages, const std::vector<at::Tensor>& arrays, const std::vector<size_t>& kinds,
                   const Sections& sections, bool joining) {
  const sok_tensor whole = view(messages, "messages");
  TORCH_CHECK_VALUE(whole.dtype == SOK_FLOAT32 || whole.dtype == SOK_INT64, "messages are float32 or int64");
  std::vector<sok_tensor> of_messages, of_arrays;
  std::vector<int64_t> next(arrays.size(), 0);
  int64_t place = 0;
  for (size_t rank = 0; rank < sections.front().size(); ++rank) {
    for (const size_t kind : kinds) {
      const int64_t size = sections[kind][rank];
      if (size == 0) continue;
      TORCH_CHECK_VALUE(arrays[kind].scalar_type() == messages.scalar_type(), "arrays of a message differ in dtype");
      of_messages.push_back(range(whole, place, size));
      of_arrays.push_back(range(view(arrays[kind], "array"), next[kind], size));
      place += size;
      next[kind] += size;
    }
  }
  const Context context(messages.device());
  SOK_CALL(sok_copy(context.get(), static_cast<int32_t>(of_messages.size()), (joining ? of_arrays : of_messages).data(),
                    (joining ? of_messages : of_arrays).data()));
}

}  // namespace

sok_tensor range(const sok_tensor& array, int64_t first, int64_t size) {
  sok_tensor result = array;
  result.data = static_cast<char*>(array.data) + first * (array.dtype == SOK_FLOAT32 ? 4 : 8);
  result.shape[0] = size;
  return result;
}

MessageCounts::MessageCounts(const at::Tensor& counts, at::IntArrayRef dimensions, at::IntArrayRef positions) {
  const int64_t num_tables = dimensions.size(), num_lookups = positions.size();
  TORCH_CHECK_VALUE(counts.dim() == 2 && counts.size(1) == num_tables + 2 * num_lookups && counts.is_cpu() &&
                        counts.scalar_type() == at::kLong && counts.stride(1) == 1,
                    "counts must be [ranks, ", num_tables + 2 * num_lookups, "] int64 on the CPU");
  const int64_t ranks = counts.size(0);
  rows.reserve(ranks * num_tables);
  keys.reserve(ranks * num_lookups);
  splits.reserve(ranks * num_lookups);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t* row = counts.const_data_ptr<int64_t>() + rank * counts.stride(0);
    for (int64_t i = 0; i < counts.size(1); ++i) {
      // So that no sum below overflows; the core takes fewer than 2^31 keys.
      TORCH_CHECK_VALUE(row[i] >= 0 && row[i] <= std::numeric_limits<int32_t>::max(),
                        "counts must be in [0, 2^31), not ", row[i]);
    }
    int64_t of_rows = 0, of_bags = 0, of_splits = 0, row_elements = 0, sum_elements = 0;
    for (int64_t table = 0; table < num_tables; ++table) {
      of_rows += row[table];
      row_elements += row[table] * dimensions[table];
    }
    const int64_t *lookup_keys = row + num_tables, *lookup_splits = lookup_keys + num_lookups;
    for (int64_t lookup = 0; lookup < num_lookups; ++lookup) {
      TORCH_CHECK_VALUE(lookup_splits[lookup] > 0 || lookup_keys[lookup] == 0, "lookup ", lookup, " has ",
                        lookup_keys[lookup], " keys, but no row splits");
      if (lookup_splits[lookup] == 0) continue;
      any_pooled = true;
      of_bags += lookup_keys[lookup];
      of_splits += lookup_splits[lookup];
      sum_elements += (lookup_splits[lookup] - 1) * dimensions[positions[lookup]];
    }
    rows.insert(rows.end(), row, lookup_keys);
    keys.insert(keys.end(), lookup_keys, lookup_splits);
    splits.insert(splits.end(), lookup_splits, lookup_splits + num_lookups);
    keys_of_rows.push_back(of_rows);
    keys_of_bags.push_back(of_bags);
    splits_of_bags.push_back(of_splits);
    elements_of_rows.push_back(row_elements);
    elements_of_sums.push_back(sum_elements);
  }
}

std::vector<int64_t> totals(const Sections& sections) {
  std::vector<int64_t> result(sections.front().size(), 0);
  for (const std::vector<int64_t>& sizes : sections) {
    for (size_t rank = 0; rank < sizes.size(); ++rank) result[rank] += sizes[rank];
  }
  return result;
}

at::Tensor join(const std::vector<at::Tensor>& arrays, const Sections& sections) {
  const std::vector<size_t> kinds = used(sections);
  if (kinds.size() == 1) return first_elements(arrays[kinds[0]], sum(sections[kinds[0]]));
  if (kinds.empty()) {
    for (const at::Tensor& array : arrays) {
      if (array.defined()) return first_elements(array, 0);
    }
    TORCH_CHECK_VALUE(false, "a message of no array");
  }
  int64_t size = 0;
  for (const size_t kind : kinds) {
    first_elements(arrays[kind], sum(sections[kind]));
    size += sum(sections[kind]);
  }
  at::Tensor messages = at::empty({size}, arrays[kinds[0]].options());
  copy_sections(messages, arrays, kinds, sections, true);
  return messages;
}

std::vector<at::Tensor> split(const at::Tensor& messages, const Sections& sections) {
  const std::vector<size_t> kinds = used(sections);
  int64_t size = 0;
  for (const size_t kind : kinds) size += sum(sections[kind]);
  TORCH_CHECK_VALUE(messages.dim() == 1 && messages.size(0) == size, "messages have ", messages.numel(),
                    " elements, not ", size);
  std::vector<at::Tensor> arrays;
  for (const std::vector<int64_t>& sizes : sections) {
    const int64_t own = sum(sizes);
    arrays.push_back(own == size ? messages : at::empty({own}, messages.options()));
  }
  if (kinds.size() > 1) copy_sections(messages, arrays, kinds, sections, false);
  return arrays;
}

}  // namespace sok_torch
