// SPDX-License-Identifier: Apache-2.0
// gather: slots -> rows, in send order. Into float32 each row is a bag of its own; rows of 16 bits an element that keep
// their dtype are copied.
#include "cuda/launch.h"
#include "cuda/placement.cuh"
#include "cuda/pool.h"
#include "cuda/report.cuh"
#include "cuda/stages.h"
#include "cuda/upload.h"
#include "cuda/vector.cuh"

namespace sok::cuda {
namespace {

// The rows that one rank asked of one table.
struct Request {
  const Table* table;
  int64_t count;
  const int64_t* slots;
  int64_t element;  // where they begin among all rows
};

std::vector<Request> list_requests(const std::vector<Table>& tables, int32_t num_sources, const int64_t* counts,
                                   const int64_t* slots) {
  std::vector<Request> requests;
  int64_t element = 0;
  for (int32_t source = 0; source < num_sources; ++source) {
    for (const Table& table : tables) {
      const int64_t count = *counts++;
      SOK_CHECK(count <= kMaxEntries, "table '", table.name, "': ", count, " rows at once, more than 2^31 - 1");
      requests.push_back({&table, count, slots, element});
      slots += count;
      element += count * table.dimension;
    }
  }
  return requests;
}

void widen_rows(const Scope& scope, const Report& report, const std::vector<Request>& requests, float* rows) {
  std::vector<PoolItem> items;
  items.reserve(requests.size());
  for (const Request& request : requests) {
    const Table& table = *request.table;
    PoolItem item = {};
    item.rows = table.weight.data;
    item.index = request.slots;
    item.index_64bit = true;
    item.output = rows + request.element;
    item.limit = table.num_slots;
    item.num_entries = item.num_bags = static_cast<uint32_t>(request.count);
    item.output_stride = table.dimension;
    item.dimension = item.stride = static_cast<uint32_t>(table.dimension);
    item.table = table.number;
    item.combiner = SOK_SUM;
    item.dtype = static_cast<uint8_t>(table.weight.dtype);
    item.multiple = multiple_of(table.dimension);
    items.push_back(item);
  }
  pool(scope, items, Fault::kSlot, report.errors());
}

struct CopyItem {
  const __half* rows;  // or another type of 16 bits
  const int64_t* slots;
  __half* output;
  int64_t limit;
  int64_t first_block;
  uint32_t count;
  uint32_t dimension;
  int32_t table;
  int32_t log_lanes;
};

template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const CopyItem* items, uint32_t num_items, sok_error_record* errors) {
  const CopyItem item =
      items[last_at_or_before(num_items, blockIdx.x, [&](uint32_t at) { return __ldg(&items[at].first_block); })];
  const int64_t i = (blockIdx.x - item.first_block) * (kThreads >> item.log_lanes) + (threadIdx.x >> item.log_lanes);
  if (i >= item.count) return;
  const int64_t slot = __ldg(reinterpret_cast<const long long*>(item.slots) + i);
  const uint32_t lane = threadIdx.x & ((1u << item.log_lanes) - 1);
  if (static_cast<uint64_t>(slot) >= static_cast<uint64_t>(item.limit)) {
    if (lane == 0) report(errors, Fault::kSlot, item.table, slot, item.limit);
    return;
  }
  const __half* const from = item.rows + slot * item.dimension;
  __half* const to = item.output + i * item.dimension;
  for (uint32_t column = lane * kWidth; column < item.dimension;
       column += static_cast<uint32_t>(kWidth) << item.log_lanes) {
    Piece<__half, kWidth>::load_constant(from + column).store_streaming(to + column);
  }
}

template <int kWidth>
void launch_copy(const Scope& scope, const Report& report, const std::vector<Request>& requests, const Floats& rows) {
  std::vector<CopyItem> items;
  int64_t blocks = 0;
  for (const Request& request : requests) {
    const Table& table = *request.table;
    const Floats output = rows.at(request.element);
    const bool aligned = is_aligned(table.weight.data) && is_aligned(output.data);
    if (request.count == 0 || width_of_rows(table.dimension, kMaxWidth, 2, aligned) != kWidth) continue;
    const int log_lanes = log_lanes_of(table.dimension, kWidth);
    items.push_back({static_cast<const __half*>(table.weight.data), request.slots, static_cast<__half*>(output.data),
                     table.num_slots, blocks, static_cast<uint32_t>(request.count),
                     static_cast<uint32_t>(table.dimension), table.number, log_lanes});
    blocks += ceil_div(request.count, kThreads >> log_lanes);
  }
  if (items.empty()) return;
  Upload upload;
  const size_t place = upload.add(items);
  upload.send(scope);
  SOK_LAUNCH(copy_kernel<kWidth>, blocks, scope.stream(), upload.at<CopyItem>(place),
             static_cast<uint32_t>(items.size()), report.errors());
}

}  // namespace

void gather(const sok_context& context, const std::vector<Table>& tables, int32_t num_sources, const int64_t* counts,
            const int64_t* /*keys*/, const int64_t* slots, const Floats& rows) {
  const Scope scope(context);
  const Report report(scope);
  const std::vector<Request> requests = list_requests(tables, num_sources, counts, slots);
  if (rows.dtype == SOK_FLOAT32) {
    widen_rows(scope, report, requests, static_cast<float*>(rows.data));
  } else {
    launch_copy<8>(scope, report, requests, rows);
    launch_copy<4>(scope, report, requests, rows);
    launch_copy<1>(scope, report, requests, rows);
  }
  report.finish(tables);
}

}  // namespace sok::cuda
