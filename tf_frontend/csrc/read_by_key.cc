// SPDX-License-Identifier: Apache-2.0
#include "read_by_key.h"

#include <algorithm>
#include <numeric>

#include "gpu.h"

namespace sok::tf {
namespace {

const sok_tensor& KeysOf(const sok_lookup& lookup) { return lookup.slots.rank > 0 ? lookup.slots : lookup.keys; }

}  // namespace

absl::Status Numbers::Take(OpKernelContext* ctx, int64_t n, Tensor* numbers) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (kept_.NumElements() < n) {
    const int64_t size = std::max(n, 2 * kept_.NumElements());
    Tensor on_host;
    TF_RETURN_IF_ERROR(AllocateHost(ctx, ::tensorflow::DT_INT64, {size}, &on_host));
    std::iota(on_host.flat<int64_t>().data(), on_host.flat<int64_t>().data() + size, int64_t{0});
    Tensor made = on_host;
    if (OnGpu(ctx)) {
      TF_RETURN_IF_ERROR(ctx->allocate_temp(::tensorflow::DT_INT64, {size}, &made));
      TF_RETURN_IF_ERROR(CopyFromHost(ctx, on_host, &made));
    }
    kept_ = made;
  }
  *numbers = kept_;
  return absl::OkStatus();
}

absl::Status RowsByKey::Read(OpKernelContext* ctx, const sok_context* core, const TableAttributes& tables,
                             Numbers* numbers, VariableLocks* locks, std::vector<sok_columns>* columns,
                             std::vector<sok_lookup>* lookups) {
  if (!OnGpu(ctx)) {
    for (int i = 0; i < tables.num_tables(); ++i) {
      if (tables.is_indexed(i)) (*columns)[i].index = ColumnBuffer::Of(*locks->tensor(i))->table()->index();
    }
    return absl::OkStatus();
  }
  int64_t most = 0;
  for (const sok_lookup& lookup : *lookups) {
    if (tables.is_indexed(lookup.table)) most = std::max(most, KeysOf(lookup).shape[0]);
  }
  TF_RETURN_IF_ERROR(numbers->Take(ctx, most, &numbers_));
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

}  // namespace sok::tf
