// SPDX-License-Identifier: Apache-2.0
// locate: key -> slot on the owner.
#include "cuda/launch.h"
#include "cuda/placement.cuh"
#include "cuda/stages.h"
#include "cuda/upload.h"
#include "cuda/vector.cuh"
#include "table/index.h"

namespace sok::cuda {
namespace {

struct Item {  // a lookup
  const void* keys;
  int64_t* slots;
  int64_t first_entry;
  Placement placement;
  int32_t table;
  bool keys_64bit;
};

__global__ void __launch_bounds__(kThreads)
    locate_kernel(const Item* items, uint32_t num_items, int64_t num_keys, sok_error_record* errors) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_keys) return;
  const Item& item = items[last_at_or_before(num_items, i, [&](uint32_t at) { return __ldg(&items[at].first_entry); })];
  const int64_t key = load_integer(item.keys, item.keys_64bit, i - item.first_entry);
  int64_t slot = -1;
  if (contains(item.placement, item.table, key, errors)) {
    const Home home = item.placement.home_of(key);
    if (home.rank == item.placement.rank) {
      slot = home.slot;
    } else {
      report(errors, Fault::kForeignKey, item.table, key, home.rank);
    }
  }
  item.slots[i - item.first_entry] = slot;
}

}  // namespace

void locate(const sok_context& context, const std::vector<Table>& tables, const std::vector<const sok_index*>& indices,
            const std::vector<Lookup>& lookups, uint32_t flags) {
  const Scope scope(context);
  const Report report(scope);
  std::vector<Item> items;
  for (const Lookup& lookup : lookups) {
    if (lookup.keys.size == 0) continue;
    items.push_back({lookup.keys.data, lookup.slots, lookup.first_entry,
                     tables[static_cast<size_t>(lookup.table)].placement, lookup.id.number, lookup.keys.is_64bit});
  }
  if (!items.empty()) {
    const int64_t num_keys = sok::count_entries(lookups);
    Upload upload;
    const size_t place = upload.add(items);
    upload.send(scope);
    SOK_LAUNCH(locate_kernel, ceil_div(num_keys, kThreads), scope.stream(), upload.at<Item>(place),
               static_cast<uint32_t>(items.size()), num_keys, report.errors());
  }
  report.finish(tables);
  ask_indices(context, indices, lookups, flags);
}

}  // namespace sok::cuda
