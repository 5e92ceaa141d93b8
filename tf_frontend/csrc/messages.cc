// SPDX-License-Identifier: Apache-2.0
#include "messages.h"

#include <limits>

namespace sok::tf {
namespace {

void Add(Sections* sections, int64_t rank, int64_t size) {
  sections->sizes[rank] += size;
  sections->total += size;
}

// Elements [first, first + size) of an array of int64 or float32.
sok_tensor Range(sok_tensor array, int64_t first, int64_t size) {
  const int64_t bytes = first * (array.dtype == SOK_FLOAT32 ? 4 : 8);
  array.data = size == 0 ? nullptr : static_cast<char*>(array.data) + bytes;
  array.shape[0] = size;
  return array;
}

absl::Status CopySections(const CoreContext& core, sok_tensor messages, const std::vector<Sectioned>& arrays,
                          bool join) {
  std::vector<sok_tensor> of_arrays, of_messages;
  std::vector<int64_t> next(arrays.size(), 0);
  int64_t place = 0;
  const size_t num_ranks = arrays.front().sections->sizes.size();
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    for (size_t i = 0; i < arrays.size(); ++i) {
      const int64_t size = arrays[i].sections->sizes[rank];
      if (size == 0) continue;
      of_arrays.push_back(Range(arrays[i].array, next[i], size));
      of_messages.push_back(Range(messages, place, size));
      next[i] += size;
      place += size;
    }
  }
  return ToStatus(sok_copy(core.get(), static_cast<int32_t>(of_arrays.size()), (join ? of_arrays : of_messages).data(),
                           (join ? of_messages : of_arrays).data()));
}

}  // namespace

absl::Status Messages::Read(const Tensor& counts, const std::vector<int64_t>& dimensions,
                            const std::vector<int64_t>& lookup_tables) {
  const size_t num_tables = dimensions.size(), num_lookups = lookup_tables.size();
  const int64_t columns = NumColumns(num_tables, num_lookups);
  if (counts.dims() != 2 || counts.dim_size(1) != columns) {
    return errors::InvalidArgument("counts must be [num_ranks, ", columns, "], not ", counts.shape().DebugString());
  }
  *this = Messages();
  num_ranks_ = counts.dim_size(0);
  pooled_.assign(num_lookups, false);
  for (Sections* sections : {&row_keys_, &bag_keys_, &bag_splits_, &rows_, &sums_})
    sections->sizes.assign(num_ranks_, 0);
  const auto matrix = counts.matrix<int64_t>();
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    for (int64_t column = 0; column < columns; ++column) {
      // So that no sum below overflows; the core takes fewer than 2^31 keys.
      if (matrix(rank, column) < 0 || matrix(rank, column) > std::numeric_limits<int32_t>::max()) {
        return errors::InvalidArgument("counts must be in [0, 2^31), not ", matrix(rank, column));
      }
    }
    for (size_t table = 0; table < num_tables; ++table) {
      const int64_t keys = matrix(rank, table);
      row_counts_.push_back(keys);
      Add(&row_keys_, rank, keys);
      Add(&rows_, rank, keys * dimensions[table]);
    }
    for (size_t lookup = 0; lookup < num_lookups; ++lookup) {
      const int64_t keys = matrix(rank, num_tables + lookup);
      const int64_t splits = matrix(rank, num_tables + num_lookups + lookup);
      if (splits == 0) {
        if (keys > 0) return errors::InvalidArgument("lookup ", lookup, " has ", keys, " keys, but no row splits");
        continue;
      }
      const int table = static_cast<int>(lookup_tables[lookup]);
      parts_.push_back({rank, table, keys, splits - 1, bag_keys_.total, bag_splits_.total});
      pooled_[lookup] = true;
      Add(&bag_keys_, rank, keys);
      Add(&bag_splits_, rank, splits);
      Add(&sums_, rank, (splits - 1) * dimensions[table]);
    }
  }
  return absl::OkStatus();
}

std::vector<sok_lookup> OwnerLookups(const Messages& messages, const std::vector<int64_t>& dimensions,
                                     const sok_tensor& keys, const sok_tensor& slots, const sok_tensor& splits,
                                     const sok_tensor& floats) {
  std::vector<sok_lookup> lookups;
  int64_t place = 0;
  const auto add = [&](int64_t table, int64_t first_key, int64_t num_keys, int64_t num_vectors) {
    sok_lookup lookup = SOK_LOOKUP_INIT;
    lookup.table = static_cast<int32_t>(table);
    if (keys.rank == 1) lookup.keys = Range(keys, first_key, num_keys);
    lookup.slots = Range(slots, first_key, num_keys);
    if (floats.rank == 1) {
      lookup.output = Range(floats, place, num_vectors * dimensions[table]);
      lookup.output.rank = 2;
      lookup.output.shape[0] = num_vectors;
      lookup.output.shape[1] = dimensions[table];
    }
    place += num_vectors * dimensions[table];
    lookups.push_back(lookup);
  };
  const int64_t* count = messages.row_counts().data();
  auto part = messages.parts().begin();
  int64_t key = 0;
  for (int64_t rank = 0; rank < messages.num_ranks(); ++rank) {
    for (size_t table = 0; table < dimensions.size(); ++table, key += *count++) {
      if (*count > 0) add(static_cast<int64_t>(table), key, *count, *count);
    }
    for (; part != messages.parts().end() && part->rank == rank; ++part) {
      add(part->table, messages.row_keys().total + part->first_key, part->num_keys, part->num_bags);
      if (splits.rank == 1) lookups.back().row_splits = Range(splits, part->first_split, part->num_bags + 1);
    }
  }
  return lookups;
}

absl::Status JoinMessages(const CoreContext& core, const std::vector<Sectioned>& arrays, sok_tensor messages) {
  return CopySections(core, messages, arrays, true);
}

absl::Status TakeApart(const CoreContext& core, sok_tensor messages, const std::vector<Sectioned>& arrays) {
  return CopySections(core, messages, arrays, false);
}

absl::Status RowsAndSums::Allocate(OpKernelContext* ctx, const Messages& messages, const Tensor& floats) {
  if (floats.dims() != 1 || floats.NumElements() != messages.num_floats()) {
    return errors::InvalidArgument("messages of ", messages.rows().total, " elements of rows and ",
                                   messages.sums().total, " of sums cannot be ", floats.shape().DebugString());
  }
  floats_ = floats;
  both_ = messages.rows().total > 0 && messages.sums().total > 0;
  if (!both_) {
    rows_ = floats.Slice(0, messages.rows().total);
    sums_ = floats.Slice(0, messages.sums().total);
    return absl::OkStatus();
  }
  TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_FLOAT, {messages.rows().total}, &rows_));
  return ctx->allocate_temp(::tensorflow::DT_FLOAT, {messages.sums().total}, &sums_);
}

absl::Status RowsAndSums::TakeApart(const CoreContext& core, const Messages& messages) {
  return both_ ? ::sok::tf::TakeApart(core, View(floats_), arrays(messages)) : absl::OkStatus();
}

absl::Status RowsAndSums::Join(const CoreContext& core, const Messages& messages) {
  return both_ ? JoinMessages(core, arrays(messages), View(floats_)) : absl::OkStatus();
}

std::vector<Sectioned> RowsAndSums::arrays(const Messages& messages) const {
  return {{&messages.rows(), rows()}, {&messages.sums(), sums()}};
}

}  // namespace sok::tf
