// SPDX-License-Identifier: Apache-2.0
#include "read_by_key.h"

#include <algorithm>
#include <numeric>

#include "gpu.h"

namespace sok::tf {
namespace {

const sok_tensor& KeysOf(const sok_lookup& lookup) { return lookup.slots.rank > 0 ? lookup.slots : lookup.keys; }

}  // namespace

absl::Status RowsByKey::Read(OpKernelContext* ctx, const sok_context* core, const TableAttributes& tables,
                             VariableLocks* locks, std::vector<sok_columns>* columns,
                             std::vector<sok_lookup>* lookups) {
  int64_t most = 0;
  for (const sok_lookup& lookup : *lookups) {
    if (tables.is_indexed(lookup.table)) most = std::max(most, KeysOf(lookup).shape[0]);
  }
  TF_RETURN_IF_ERROR(MakeNumbers(ctx, most));
  for (sok_lookup& lookup : *lookups) {
    if (!tables.is_indexed(lookup.table)) continue;
    const sok_placement& table = tables.tables()[lookup.table];
    const sok_tensor keys = KeysOf(lookup);
    const int64_t n = keys.shape[0];
    const Tensor& held = *locks->tensor(lookup.table);
    rows_.emplace_back();
    TF_RETURN_IF_ERROR(ctx->allocate_temp(held.dtype(), {n, table.dimension}, &rows_.back()));
    TF_RETURN_IF_ERROR(ColumnBuffer::Of(held)->table()->Read(core, keys, View(rows_.back())));
    lookup.table = static_cast<int32_t>(columns->size());
    lookup.slots = View(numbers_);
    lookup.slots.shape[0] = n;
    sok_columns read = SOK_COLUMNS_INIT;
    read.name = table.name;
    read.weight = View(rows_.back());
    columns->push_back(read);
  }
  return absl::OkStatus();
}

absl::Status RowsByKey::MakeNumbers(OpKernelContext* ctx, int64_t n) {
  Tensor numbers;
  TF_RETURN_IF_ERROR(AllocateHost(ctx, ::tensorflow::DT_INT64, {n}, &numbers));
  std::iota(numbers.flat<int64_t>().data(), numbers.flat<int64_t>().data() + n, int64_t{0});
  numbers_ = numbers;
  if (!OnGpu(ctx) || n == 0) return absl::OkStatus();
  TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_INT64, {n}, &numbers_));
  return CopyFromHost(ctx, numbers, &numbers_);
}

}  // namespace sok::tf
