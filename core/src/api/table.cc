// SPDX-License-Identifier: Apache-2.0
// Entry points of sok/table.h and sok/initialize.h.
#include "api/dispatch.h"
#include "common/initializer.h"
#include "common/tensor.h"

using namespace sok;  // NOLINT: entry points only

extern "C" int64_t sok_placement_local_rows(int64_t num_rows, int32_t owner, int32_t num_ranks, int32_t rank) {
  if (num_rows < 1 || num_ranks < 1 || rank < 0 || rank >= num_ranks || owner < -1 || owner >= num_ranks) return -1;
  return Placement{owner, num_ranks, rank, num_rows}.local_rows(rank);
}

extern "C" int sok_assign(const sok_context* context, const sok_columns* columns, sok_tensor slots, sok_tensor values,
                          sok_tensor target) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    const Columns view = check_columns(checked, columns);
    const Integers slot_view = check_integers(slots, {"slots", -1, nullptr, view.name}, kAnySize);
    const Floats target_view =
        check_floats(target, {"target", -1, nullptr, view.name}, {view.num_slots, view.dimension});
    SOK_CHECK(target_view.dtype == SOK_FLOAT32 || target_view.dtype == view.weight.dtype, "table '", view.name,
              "': target is ", dtype_name(target_view.dtype), ", must be float32 or ", dtype_name(view.weight.dtype),
              " as the table's weight is");
    const Label label{"values", -1, nullptr, view.name};
    Floats value_view = {values.data, target_view.dtype};
    if (values.dtype == target_view.dtype) {
      check_tensor(values, label, {target_view.dtype}, {slot_view.size, view.dimension});
    } else {  // numbers to be rounded
      value_view.dtype = SOK_FLOAT32;
      check_tensor(values, label, {SOK_FLOAT32}, {slot_view.size, view.dimension});
    }
    SOK_DISPATCH(checked, assign, view, slot_view, value_view, target_view);
  });
}

extern "C" int sok_initialize(const sok_context* context, const sok_initializer* initializer, sok_tensor keys,
                              int64_t first_key, int64_t key_stride, sok_tensor rows) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    SOK_CHECK(initializer != nullptr, "initializer is NULL");
    check_initializer(*initializer);
    const Floats row_view = check_floats(rows, {"rows"}, {kAnySize, kAnySize});
    const int64_t n = rows.shape[0];
    const int64_t* keys_data = is_absent(keys) ? nullptr : checked_data<const int64_t>(keys, {"keys"}, SOK_INT64, {n});
    const InitialRows filled = {{keys_data, n, true},
                                static_cast<uint64_t>(first_key),
                                static_cast<uint64_t>(key_stride),
                                rows.shape[1],
                                row_view};
    SOK_DISPATCH(checked, initialize, *initializer, filled);
  });
}
