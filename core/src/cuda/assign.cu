// SPDX-License-Identifier: Apache-2.0
// assign: rows by slot. Slots are sorted, so that of equal ones the last is found.
#include <type_traits>

#include "cuda/launch.h"
#include "cuda/report.cuh"
#include "cuda/sort.h"
#include "cuda/stages.h"
#include "cuda/upload.h"
#include "cuda/vector.cuh"

namespace sok::cuda {
namespace {

template <typename Slot>
__global__ void __launch_bounds__(kThreads)
    slots_kernel(const void* given, bool is_64bit, int64_t size, int32_t table, int64_t num_slots, Slot* slots,
                 uint32_t* numbers, int32_t* gate, sok_error_record* errors) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= size) return;
  const int64_t slot = load_integer(given, is_64bit, i);
  if (static_cast<uint64_t>(slot) >= static_cast<uint64_t>(num_slots)) {
    report(errors, Fault::kSlot, table, slot, num_slots);
    *gate = 1;
  }
  slots[i] = static_cast<Slot>(slot);
  numbers[i] = static_cast<uint32_t>(i);
}

template <typename From, typename To, int kWidth, typename Slot>
__global__ void __launch_bounds__(kThreads)
    assign_kernel(const Slot* slots, const uint32_t* numbers, int64_t size, const From* values, To* target,
                  int64_t dimension, int log_lanes, const int32_t* gate) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * (kThreads >> log_lanes) + (threadIdx.x >> log_lanes);
  if (i >= size || *gate != 0) return;
  const int64_t slot = static_cast<int64_t>(slots[i]);
  if (i + 1 < size && static_cast<int64_t>(slots[i + 1]) == slot) return;
  const From* const from = values + static_cast<int64_t>(numbers[i]) * dimension;
  const int64_t step = int64_t{kWidth} << log_lanes;
  for (int64_t column = (threadIdx.x & ((1 << log_lanes) - 1)) * kWidth; column < dimension; column += step) {
    const Piece<From, kWidth> piece = Piece<From, kWidth>::load_constant(from + column);
    To* const to = target + slot * dimension + column;
    if constexpr (std::is_same_v<From, To>) {
      piece.store(to);
    } else {
      Piece<To, kWidth>::of(piece.wide()).store(to);
    }
  }
}

template <typename Slot>
void run(const Scope& scope, const Report& report, const Columns& table, const Integers& given, const Floats& values,
         const Floats& target) {
  const Buffer<int32_t> gate(scope.context(), 1);
  const Buffer<Slot> slots(scope.context(), given.size), other_slots(scope.context(), given.size);
  const Buffer<uint32_t> numbers(scope.context(), given.size), other_numbers(scope.context(), given.size);
  Upload upload;
  upload.send(scope, gate.data(), report.errors());
  SOK_LAUNCH(slots_kernel<Slot>, ceil_div(given.size, kThreads), scope.stream(), given.data, given.is_64bit, given.size,
             table.number, table.num_slots, slots.data(), numbers.data(), gate.data(), report.errors());
  Pairs<Slot> pairs = {{slots.data(), other_slots.data()}, {numbers.data(), other_numbers.data()}};
  sort_pairs(scope, pairs, given.size, std::max(1, ceil_log2(table.num_slots)));
  const int width = width_of(table.dimension, is_aligned(values.data) && is_aligned(target.data));
  const int log_lanes = log_lanes_of(table.dimension, width);
  const int64_t blocks = ceil_div(given.size, kThreads >> log_lanes);
  const auto write = [&](auto* from, auto* to) {
    using From = std::remove_pointer_t<decltype(from)>;
    using To = std::remove_pointer_t<decltype(to)>;
    const From* const source = static_cast<const From*>(values.data);
    To* const rows = static_cast<To*>(target.data);
    if (width == 4) {
      SOK_LAUNCH((assign_kernel<From, To, 4, Slot>), blocks, scope.stream(), pairs.keys[1], pairs.values[1], given.size,
                 source, rows, table.dimension, log_lanes, gate.data());
    } else {
      SOK_LAUNCH((assign_kernel<From, To, 1, Slot>), blocks, scope.stream(), pairs.keys[1], pairs.values[1], given.size,
                 source, rows, table.dimension, log_lanes, gate.data());
    }
  };
  with_element(target.dtype, [&](auto* to) {
    values.dtype == target.dtype ? write(to, to) : write(static_cast<float*>(nullptr), to);
  });
}

}  // namespace

void assign(const sok_context& context, const Columns& table, const Integers& slots, const Floats& values,
            const Floats& target) {
  const Scope scope(context);
  const Report report(scope);
  SOK_CHECK(slots.size <= kMaxEntries, "table '", table.name, "': ", slots.size,
            " slots; a call takes fewer than 2^31 on a CUDA device");
  if (slots.size > 0) {
    if (table.num_slots < int64_t{UINT32_MAX}) {
      run<uint32_t>(scope, report, table, slots, values, target);
    } else {
      run<uint64_t>(scope, report, table, slots, values, target);
    }
  }
  report.finish(table);
}

}  // namespace sok::cuda
