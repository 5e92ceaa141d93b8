// SPDX-License-Identifier: Apache-2.0
#include "message_counts.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <numeric>

#include "context.h"
#include "sok/messages.h"
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

// Sections as sok/messages.h takes them: sizes one after the other, and views of the arrays.
struct SectionViews {
  SectionViews(const std::vector<at::Tensor>& arrays, const Sections& sections) {
    for (size_t i = 0; i < sections.size(); ++i) {
      sizes.insert(sizes.end(), sections[i].begin(), sections[i].end());
      views.push_back(sum(sections[i]) > 0 ? view(arrays[i], "array") : kAbsent);
    }
  }

  std::vector<int64_t> sizes;
  std::vector<sok_tensor> views;
};

}  // namespace

MessageCounts::MessageCounts(const at::Tensor& counts, at::IntArrayRef dimensions, at::IntArrayRef positions) {
  const int64_t num_tables = dimensions.size(), num_lookups = positions.size();
  TORCH_CHECK_VALUE(counts.dim() == 2 && counts.size(1) == num_tables + 2 * num_lookups && counts.is_cpu() &&
                        counts.scalar_type() == at::kLong && counts.stride(1) == 1,
                    "counts must be [ranks, ", num_tables + 2 * num_lookups, "] int64 on the CPU");
  const int64_t ranks = counts.size(0);
  rows.resize(ranks * num_tables);
  std::vector<int64_t> sizes(SOK_NUM_SECTIONS * ranks);
  std::vector<sok_message_part> parts(ranks * (num_tables + num_lookups));
  sok_message_layout layout = {sizeof(sok_message_layout),
                               static_cast<int32_t>(ranks),
                               static_cast<int32_t>(num_tables),
                               static_cast<int32_t>(num_lookups),
                               0,
                               dimensions.data(),
                               positions.data(),
                               counts.const_data_ptr<int64_t>(),
                               counts.stride(0),
                               rows.data(),
                               sizes.data(),
                               parts.data()};
  check(sok_message_layout_read(&layout));
  keys.resize(ranks * num_lookups);
  splits.resize(ranks * num_lookups);
  for (int32_t i = 0; i < layout.num_parts; ++i) {
    const sok_message_part& part = parts[i];
    if (part.lookup < 0) continue;
    any_pooled = true;
    keys[part.rank * num_lookups + part.lookup] = part.num_keys;
    splits[part.rank * num_lookups + part.lookup] = part.num_values + 1;
  }
  auto size = sizes.begin();
  for (auto* section : {&keys_of_rows, &keys_of_bags, &splits_of_bags, &elements_of_rows, &elements_of_sums}) {
    section->assign(size, size + ranks);
    size += ranks;
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
  const SectionViews of(arrays, sections);
  const Context context(messages.device());
  SOK_CALL(sok_messages_join(context.get(), static_cast<int32_t>(sections.front().size()),
                             static_cast<int32_t>(sections.size()), of.sizes.data(), of.views.data(),
                             view(messages, "messages")));
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
  if (kinds.size() <= 1) return arrays;
  const SectionViews of(arrays, sections);
  const Context context(messages.device());
  SOK_CALL(sok_messages_split(context.get(), static_cast<int32_t>(sections.front().size()),
                              static_cast<int32_t>(sections.size()), of.sizes.data(), view(messages, "messages"),
                              of.views.data()));
  return arrays;
}

}  // namespace sok_torch
