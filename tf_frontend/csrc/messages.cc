// SPDX-License-Identifier: Apache-2.0
#include "messages.h"

#include <numeric>

namespace sok::tf {
namespace {

int32_t NumSections(sok_section first) { return first == SOK_SECTION_KEYS ? SOK_NUM_KEY_SECTIONS : 2; }

}  // namespace

absl::Status Messages::Read(const Tensor& counts, const std::vector<int64_t>& dimensions,
                            const std::vector<int64_t>& lookup_tables) {
  const size_t num_tables = dimensions.size(), num_lookups = lookup_tables.size();
  const int64_t columns = NumColumns(num_tables, num_lookups);
  if (counts.dims() != 2 || counts.dim_size(1) < columns) {
    return errors::InvalidArgument("counts must be [num_ranks, ", columns, "], not ", counts.shape().DebugString());
  }
  const size_t num_ranks = counts.dim_size(0);
  row_counts_.resize(num_ranks * num_tables);
  sizes_.resize(SOK_NUM_SECTIONS * num_ranks);
  parts_.resize(num_ranks * (num_tables + num_lookups));
  layout_ = {sizeof(sok_message_layout),
             static_cast<int32_t>(num_ranks),
             static_cast<int32_t>(num_tables),
             static_cast<int32_t>(num_lookups),
             0,
             dimensions.data(),
             lookup_tables.data(),
             static_cast<const int64_t*>(counts.data()),
             counts.dim_size(1),
             row_counts_.data(),
             sizes_.data(),
             parts_.data()};
  TF_RETURN_IF_ERROR(ToStatus(sok_message_layout_read(&layout_)));
  pooled_.assign(num_lookups, false);
  for (int32_t i = 0; i < layout_.num_parts; ++i) {
    if (parts_[i].lookup >= 0) pooled_[parts_[i].lookup] = true;
  }
  for (int section = 0; section < SOK_NUM_SECTIONS; ++section) {
    const int64_t* const sizes = sizes_.data() + section * num_ranks;
    totals_[section] = std::accumulate(sizes, sizes + num_ranks, int64_t{0});
  }
  return absl::OkStatus();
}

int64_t Messages::Elements(int first, int end, int64_t rank) const {
  int64_t result = 0;
  for (int section = first; section < end; ++section) result += sizes_[section * num_ranks() + rank];
  return result;
}

absl::Status Messages::Join(const CoreContext& core, sok_section first, const std::vector<sok_tensor>& sections,
                            sok_tensor messages) const {
  return ToStatus(sok_messages_join(core.get(), num_ranks(), NumSections(first), sizes_.data() + first * num_ranks(),
                                    sections.data(), messages));
}

absl::Status Messages::Split(const CoreContext& core, sok_section first, sok_tensor messages,
                             const std::vector<sok_tensor>& sections) const {
  return ToStatus(sok_messages_split(core.get(), num_ranks(), NumSections(first), sizes_.data() + first * num_ranks(),
                                     messages, sections.data()));
}

absl::Status Messages::OwnerLookups(const sok_tensor& keys, const sok_tensor& slots, const sok_tensor& splits,
                                    const sok_tensor& floats, std::vector<sok_lookup>* lookups) const {
  lookups->resize(layout_.num_parts);
  return ToStatus(sok_message_lookups(&layout_, keys, slots, splits, floats, lookups->data()));
}

absl::Status RowsAndSums::Allocate(OpKernelContext* ctx, const Messages& messages, const Tensor& floats) {
  const int64_t rows = messages.total(SOK_SECTION_ROWS), sums = messages.total(SOK_SECTION_SUMS);
  if (floats.dims() != 1 || floats.NumElements() != rows + sums) {
    return errors::InvalidArgument("messages of ", rows, " elements of rows and ", sums, " of sums cannot be ",
                                   floats.shape().DebugString());
  }
  floats_ = floats;
  both_ = rows > 0 && sums > 0;
  if (!both_) {
    rows_ = floats.Slice(0, rows);
    sums_ = floats.Slice(0, sums);
    return absl::OkStatus();
  }
  TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_FLOAT, {rows}, &rows_));
  return ctx->allocate_temp(::tensorflow::DT_FLOAT, {sums}, &sums_);
}

absl::Status RowsAndSums::TakeApart(const CoreContext& core, const Messages& messages) {
  return both_ ? messages.Split(core, SOK_SECTION_ROWS, View(floats_), {rows(), sums()}) : absl::OkStatus();
}

absl::Status RowsAndSums::Join(const CoreContext& core, const Messages& messages) {
  return both_ ? messages.Join(core, SOK_SECTION_ROWS, {rows(), sums()}, View(floats_)) : absl::OkStatus();
}

}  // namespace sok::tf
