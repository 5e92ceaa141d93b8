// SPDX-License-Identifier: Apache-2.0
// What is not part of a training step's flow: bags from coordinates, initial values, assignment.
#include <ATen/Functions.h>

#include <algorithm>

#include "context.h"
#include "error_records.h"
#include "indexed_table.h"
#include "ops.h"
#include "sok/coordinates.h"
#include "sok/initialize.h"
#include "sok/lookup.h"
#include "sok/table.h"
#include "status.h"
#include "views.h"

namespace sok_torch {

std::tuple<at::Tensor, at::Tensor, at::Tensor> bags(const at::Tensor& rows, int64_t num_bags) {
  TORCH_CHECK_VALUE(num_bags >= 0, "num_bags must not be negative, got ", num_bags);
  const at::Tensor contiguous = rows.contiguous();
  const at::TensorOptions int64 = rows.options().dtype(at::kLong);
  at::Tensor row_splits = at::empty({num_bags + 1}, int64);
  at::Tensor order = at::empty({contiguous.size(0)}, int64);
  at::Tensor sorted = at::empty({1}, int64.dtype(at::kInt));
  const Context context(rows.device(), Earlier::kRaised);
  SOK_CALL(sok_bags_from_coordinates(context.get(), view(contiguous, "rows"), num_bags, view(row_splits, "row_splits"),
                                     view(order, "order"), view(sorted, "sorted")));
  return {row_splits, order, sorted};
}

void initialize(at::Tensor rows, int64_t kind, int64_t seed, double a, double b, const std::optional<at::Tensor>& keys,
                int64_t first_key, int64_t key_stride) {
  sok_initializer initializer = SOK_INITIALIZER_INIT;
  initializer.kind = static_cast<int32_t>(kind);
  initializer.seed = static_cast<uint64_t>(seed);
  initializer.a = a;
  initializer.b = b;
  const Context context(rows.device());
  SOK_CALL(sok_initialize(context.get(), &initializer, keys ? view(*keys, "keys") : kAbsent, first_key, key_stride,
                          view(rows, "rows")));
  rows.unsafeGetTensorImpl()->bump_version();
}

void assign(at::Tensor target, std::string name, int64_t owner, int64_t num_rows, int64_t num_ranks, int64_t rank,
            const at::Tensor& keys, const at::Tensor& values) {
  const IndexedTable::Use use(target, true);
  sok_columns columns = make_columns(target, name.c_str());
  sok_placement placement = SOK_PLACEMENT_INIT;
  placement.name = columns.name;
  placement.owner = static_cast<int32_t>(owner);
  placement.num_ranks = static_cast<int32_t>(num_ranks);
  placement.rank = static_cast<int32_t>(rank);
  placement.num_rows = num_rows;
  placement.dimension = target.size(1);
  std::vector<at::Tensor> owned;
  const at::Tensor slots = at::empty_like(keys, keys.options().dtype(at::kLong), at::MemoryFormat::Contiguous);
  sok_lookup lookup = SOK_LOOKUP_INIT;
  lookup.keys = view(keys, "keys", &owned);
  lookup.slots = view(slots, "slots");
  const Context context(target.device(), Earlier::kRaised);
  if (const auto table = IndexedTable::of(target); table.defined()) {
    const sok_index* const index = table->index();
    SOK_CALL_GROWING(target.device(), sok_locate(context.get(), 1, &placement, &index, 1, &lookup,
                                                 SOK_LOCATE_INSERT | SOK_LOCATE_BESIDE));
    table->grown();
    columns = table->columns(name.c_str());
  } else {
    SOK_CALL(sok_locate(context.get(), 1, &placement, nullptr, 1, &lookup, 0));
  }
  SOK_CALL(sok_assign(context.get(), &columns, lookup.slots, view(values, "values", &owned), columns.weight));
  target.unsafeGetTensorImpl()->bump_version();
}

namespace {

// Step counts, as torch.optim keeps them: PyTorch's own functions take a microsecond for each.
bool on_host(const at::Tensor& number) {
  return number.is_cpu() && number.layout() == at::kStrided && number.scalar_type() == at::kFloat &&
         number.numel() == 1;
}

}  // namespace

std::optional<double> common_number(at::TensorList numbers) {
  std::optional<double> result;
  for (const at::Tensor& number : numbers) {
    if (!on_host(number)) return std::nullopt;
    const double value = *number.const_data_ptr<float>();
    if (result.has_value() && *result != value) return std::nullopt;
    result = value;
  }
  return result;
}

void count_up(at::TensorList numbers) {
  if (!std::all_of(numbers.begin(), numbers.end(), on_host)) {
    at::_foreach_add_(numbers, 1);
    return;
  }
  for (const at::Tensor& number : numbers) {
    *number.mutable_data_ptr<float>() += 1.0F;
    number.unsafeGetTensorImpl()->bump_version();
  }
}

at::Tensor error_flags(const at::Tensor& counts) {
  at::Tensor flags = at::empty({counts.size(0)}, counts.options());
  const Context context(counts.device());
  check(sok_error_record_flag(context.get(), view(flags, "flags")));
  return flags;
}

void check_errors(int64_t device) { check_error_record(static_cast<c10::DeviceIndex>(device)); }

std::vector<int64_t> error_devices() { return error_record_devices(); }

void check_status(int64_t status) { check(static_cast<int>(status)); }

}  // namespace sok_torch
