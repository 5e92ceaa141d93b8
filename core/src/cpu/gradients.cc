// SPDX-License-Identifier: Apache-2.0
#include "cpu/gradients.h"

#include <algorithm>
#include <cmath>

#include "cpu/contents.h"

namespace sok::cpu {
namespace {

constexpr int64_t kEntriesPerPiece = 1 << 15;

}  // namespace

GroupedGradients::Plan GroupedGradients::plan(const Source& source, Slots slots) {
  Plan plan;
  plan.table = source.table;
  int64_t entries = 0, rows = 0;
  bool any_splits = false, any_members = false;
  for (const Gradient& gradient : *source.summands) {
    const int64_t size = gradient.slots.size;
    const int64_t per_bag = std::max<int64_t>(1, size / std::max<int64_t>(1, gradient.num_rows));
    plan.summands.push_back({&gradient, entries, rows, std::max<int64_t>(1, kEntriesPerPiece / per_bag)});
    plan.pieces.add(gradient.num_rows, plan.summands.back().bags_per_piece);
    const bool pooled = gradient.row_splits != nullptr && gradient.combiner != SOK_SUM;
    plan.by_entry |= gradient.weights != nullptr;
    plan.scaled |= pooled || gradient.weights != nullptr;
    any_splits |= gradient.row_splits != nullptr;
    any_members |= gradient.values.batch != 0;
    entries += size;
    rows += gradient.num_rows;
  }
  plan.by_pointer = plan.summands.size() > 1 || (plan.by_entry && any_splits) || any_members;
  plan.numbers = plan.by_entry ? entries : rows;
  plan.as_given = slots == Slots::kAnyOrder && plan.summands.size() == 1 && source.summands->front().unique &&
                  !any_splits && !any_members;
  return plan;
}

GroupedGradients::GroupedGradients(const sok_context& context, const std::vector<Source>& sources, Slots slots) {
  static constexpr const char* kField = "row_splits";
  std::vector<GroupJob> jobs;
  int64_t scales = 0, rows = 0;
  for (const Source& source : sources) {
    plans_.push_back(plan(source, slots));
    const Plan& plan = plans_.back();
    int64_t entries = 0;
    for (size_t p = 0; p < plan.summands.size(); ++p) {
      const Gradient& gradient = *plan.summands[p].gradient;
      check_split_ends(gradient.row_splits, gradient.num_rows, gradient.slots.size,
                       {"gradients", static_cast<int64_t>(p), kField, source.table->name});
      entries += gradient.slots.size;
    }
    scales += plan.scaled ? plan.numbers : 0;
    rows += plan.by_pointer ? plan.numbers : 0;
    jobs.push_back({plan.as_given ? 0 : entries, static_cast<uint64_t>(source.table->num_slots), plan.pieces.count()});
  }
  scales_ = Buffer<float>(context, scales);
  rows_ = Buffer<const float*>(context, rows);
  scales = rows = 0;
  for (Plan& plan : plans_) {
    if (plan.scaled) plan.scales = scales_.data() + std::exchange(scales, scales + plan.numbers);
    if (plan.by_pointer) plan.rows = rows_.data() + std::exchange(rows, rows + plan.numbers);
  }
  groups_.emplace_back(context, jobs,
                       [&](size_t job, int64_t piece, auto* entries) { fill(plans_[job], piece, entries); });
}

template <typename Entry>
void GroupedGradients::fill(const Plan& plan, int64_t piece, Entry* entries) {
  const Chunks::Range range = plan.pieces[piece];
  const Summand& summand = plan.summands[static_cast<size_t>(range.item)];
  const Gradient& gradient = *summand.gradient;
  const int64_t* const splits = gradient.row_splits;
  check_splits(splits, range.begin, range.end, gradient.slots.size,
               {"gradients", range.item, "row_splits", plan.table->name});
  check_slots(*plan.table, gradient.slots, splits != nullptr ? splits[range.begin] : range.begin,
              splits != nullptr ? splits[range.end] : range.end);
  if (plan.scaled || plan.by_pointer) fill_sources(plan, summand, range.begin, range.end);
  if (plan.as_given) return;
  if (gradient.slots.is_64bit) {
    fill_entries<int64_t>(plan, summand, range.begin, range.end, entries);
  } else {
    fill_entries<int32_t>(plan, summand, range.begin, range.end, entries);
  }
}

template <typename Slot, typename Entry>
void GroupedGradients::fill_entries(const Plan& plan, const Summand& summand, int64_t begin, int64_t end,
                                    Entry* entries) {
  const Slot* const slots = static_cast<const Slot*>(summand.gradient->slots.data);
  const int64_t* const splits = summand.gradient->row_splits;
  Entry* const out = entries + summand.first_entry;
  if (plan.by_entry || splits == nullptr) {
    const int64_t first = splits != nullptr ? splits[begin] : begin, last = splits != nullptr ? splits[end] : end;
    const uint32_t number = static_cast<uint32_t>(plan.by_entry ? summand.first_entry : summand.first_row);
    for (int64_t i = first; i < last; ++i) {
      out[i] = Entry::make(static_cast<uint64_t>(slots[i]), number + static_cast<uint32_t>(i));
    }
    return;
  }
  for (int64_t bag = begin; bag < end; ++bag) {
    const uint32_t number = static_cast<uint32_t>(summand.first_row + bag);
    for (int64_t i = splits[bag]; i < splits[bag + 1]; ++i) {
      out[i] = Entry::make(static_cast<uint64_t>(slots[i]), number);
    }
  }
}

void GroupedGradients::fill_sources(const Plan& plan, const Summand& summand, int64_t begin, int64_t end) {
  const Gradient& gradient = *summand.gradient;
  const int64_t* const splits = gradient.row_splits;
  const int64_t first_number = plan.by_entry ? summand.first_entry : summand.first_row;
  if (plan.scaled && gradient.weights != nullptr) {
    kernels().bag_scales(splits, gradient.weights, gradient.combiner, begin, end, plan.scales + first_number);
  }
  for (int64_t bag = begin; bag < end; ++bag) {
    const int64_t first = splits != nullptr ? splits[bag] : bag, last = splits != nullptr ? splits[bag + 1] : bag + 1;
    const int64_t begin_number = plan.by_entry ? first : bag, end_number = plan.by_entry ? last : bag + 1;
    if (plan.by_pointer) {
      for (int64_t i = begin_number; i < end_number; ++i) {
        plan.rows[first_number + i] = gradient.values.at(bag);
      }
    }
    if (plan.scaled && gradient.weights == nullptr) {
      const float count = static_cast<float>(std::max<int64_t>(1, last - first));
      const float scale = gradient.combiner == SOK_SUM    ? 1.0f
                          : gradient.combiner == SOK_MEAN ? 1.0f / count
                                                          : 1.0f / std::sqrt(count);
      for (int64_t i = begin_number; i < end_number; ++i) plan.scales[first_number + i] = scale;
    }
  }
}

GroupedGradients::Result GroupedGradients::operator[](size_t source) const {
  const Plan& plan = plans_[source];
  Result result = {};
  if (plan.summands.empty()) return result;
  const Gradient& first = *plan.summands.front().gradient;
  result.segments.base = first.values.data;
  result.segments.stride = first.values.stride;
  result.segments.rows = plan.rows;
  result.segments.scales = plan.scales;
  result.segments.dimension = plan.table->dimension;
  if (plan.as_given) {
    result.count = first.slots.size;
    if (first.slots.is_64bit) {
      result.slots64 = static_cast<const int64_t*>(first.slots.data);
    } else {
      result.slots32 = static_cast<const uint32_t*>(first.slots.data);  // checked: none is negative
    }
    return result;
  }
  const Group& group = groups_.front()[source];
  result.count = group.count;
  result.segments.order = group.order;
  result.segments.splits = group.splits;
  result.slots32 = group.keys32;
  result.slots64 = group.keys64;
  return result;
}

}  // namespace sok::cpu
