// SPDX-License-Identifier: Apache-2.0
#include "cuda/segments.h"

#include <algorithm>

#include "cuda/launch.h"
#include "sok/optimizer.h"

namespace sok::cuda {

Rule rule_of(const OptimizerConstants& k) {
  switch (k.kind) {
    case SOK_MOMENTUM:
      return Rule::kMomentum;
    case SOK_ADAGRAD:
      return Rule::kAdagrad;
    case SOK_ROWWISE_ADAGRAD:
      return Rule::kRowwiseAdagrad;
    case SOK_ADAM:
      return Rule::kAdam;
    case SOK_ADAMAX:
      return Rule::kAdamax;
    case SOK_ADADELTA:
      return Rule::kAdadelta;
    case SOK_RMSPROP:
      if ((k.flags & SOK_CENTERED) != 0) {
        return k.has_momentum ? Rule::kRmsPropCenteredMomentum : Rule::kRmsPropCentered;
      }
      return k.has_momentum ? Rule::kRmsPropMomentum : Rule::kRmsProp;
    case SOK_FTRL:
      return k.power == 0.5f ? Rule::kFtrl : Rule::kFtrlPower;
    default:
      return Rule::kSgd;
  }
}

SegmentPlan::SegmentPlan(const SegmentGroup& group, Upload& upload)
    : rule_(group.rule),
      dtype_(group.dtype),
      width_(group.width),
      log_lanes_(group.log_lanes),
      num_tables_(static_cast<uint32_t>(group.tables.size())) {
  tables_ = upload.add(group.tables);
  for (const SegmentTable& table : group.tables) {
    partial_stride_ = std::max(partial_stride_, (table.dimension + 3) / 4 * 4);
    scaled_ = scaled_ || table.row_scales != nullptr;
  }
  const int64_t groups_of_block = kThreads >> log_lanes_;
  std::vector<int64_t> first = group.first_entries, size = group.num_entries;
  for (;;) {
    std::vector<SegmentSpan> spans(group.tables.size());
    Level level = {};
    for (size_t t = 0; t < spans.size(); ++t) {
      const int64_t chunks = size[t] / kChunk;
      spans[t] = {static_cast<uint32_t>(level.num_blocks), static_cast<uint32_t>(first[t]),
                  static_cast<uint32_t>(chunks), static_cast<uint32_t>(level.next_entries)};
      level.num_blocks += ceil_div(chunks, groups_of_block);
      level.most_blocks = std::max(level.most_blocks, ceil_div(chunks, groups_of_block));
      first[t] = level.next_entries;
      size[t] = chunks > 1 ? round_up(2 * chunks, kChunk) : 0;
      level.next_entries += size[t];
    }
    level.spans = upload.add(spans);
    levels_.push_back(level);
    if (level.next_entries == 0) return;
  }
}

namespace {

template <typename Key>
SegmentLauncher<Key> find_launcher(Rule rule) {
  for (const auto find : {store_launcher<Key>, sgd_launcher<Key>, adagrad_launcher<Key>, adam_launcher<Key>,
                          adadelta_launcher<Key>, rmsprop_launcher<Key>, ftrl_launcher<Key>}) {
    if (const SegmentLauncher<Key> found = find(rule)) return found;
  }
  fail(SOK_INTERNAL, "no kernel for rule ", static_cast<int32_t>(rule));
}

}  // namespace

template <typename Key>
void SegmentPlan::run(const Scope& scope, const Upload& upload, const Key* keys, const uint32_t* values,
                      const EntrySource* sources, const int32_t* gate) const {
  const SegmentLauncher<Key> launch = find_launcher<Key>(rule_);
  // The lists of all later levels, each after the one before it: an allocation takes the host a microsecond.
  int64_t all_entries = 0, first = 0;
  for (const Level& at : levels_) all_entries += at.next_entries;
  const Buffer<Key> later_keys(scope.context(), all_entries);
  const Buffer<uint32_t> later_values(scope.context(), all_entries);
  const Buffer<float> later_partials(scope.context(), all_entries * partial_stride_);
  const float* partials = nullptr;
  for (const Level& at : levels_) {
    SegmentLevel<Key> level = {};
    level.tables = upload.at<SegmentTable>(tables_);
    level.spans = upload.at<SegmentSpan>(at.spans);
    level.num_tables = num_tables_;
    level.log_lanes = log_lanes_;
    level.keys = keys;
    level.values = values;
    level.sources = sources;
    level.partials = partials;
    if (at.next_entries > 0) {
      level.next_keys = later_keys.data() + first;
      level.next_values = later_values.data() + first;
      level.next_partials = later_partials.data() + first * partial_stride_;
    }
    level.gate = gate;
    level.partial_stride = partial_stride_;
    level.dtype = dtype_;
    const bool plain = partials == nullptr && sources == nullptr && !scaled_;
    if (at.num_blocks > 0) {
      level.one_row_a_table = num_tables_ <= 65535 && at.most_blocks * num_tables_ <= 2 * at.num_blocks;
      const dim3 blocks =
          level.one_row_a_table ? dim3(grid_of(at.most_blocks), num_tables_) : dim3(grid_of(at.num_blocks));
      launch(level, width_, plain, blocks, scope.stream());
    }
    first += at.next_entries;
    keys = level.next_keys;
    values = level.next_values;
    partials = level.next_partials;
    sources = nullptr;
  }
}

template void SegmentPlan::run(const Scope&, const Upload&, const uint32_t*, const uint32_t*, const EntrySource*,
                               const int32_t*) const;
template void SegmentPlan::run(const Scope&, const Upload&, const uint64_t*, const uint32_t*, const EntrySource*,
                               const int32_t*) const;

}  // namespace sok::cuda
