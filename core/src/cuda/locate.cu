// SPDX-License-Identifier: Apache-2.0
// locate: key -> slot on the owner.
#include "cuda/launch.h"
#include "cuda/placement.cuh"
#include "cuda/splits.cuh"
#include "cuda/stages.h"
#include "cuda/upload.h"
#include "cuda/vector.cuh"
#include "table/index.h"

namespace sok::cuda {
namespace {

struct Item {  // the keys of a lookup, or the row splits of one
  const void* keys;
  int64_t* slots;
  int64_t first_entry;
  Placement placement;
  int32_t table;
  bool keys_64bit;
  const int64_t* splits;  // nullptr: keys
  int64_t num_bags, num_keys;
};

__global__ void __launch_bounds__(kThreads)
    locate_kernel(const Item* items, uint32_t num_items, int64_t num_entries, sok_error_record* errors) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_entries) return;
  const Item& item = items[last_at_or_before(num_items, i, [&](uint32_t at) { return __ldg(&items[at].first_entry); })];
  if (item.splits != nullptr) {
    const int64_t bag = i - item.first_entry;
    if (!is_split(item.splits, bag, item.num_bags, item.num_keys)) {
      report(errors, Fault::kRowSplits, item.table, bag, item.num_keys);
    }
    return;
  }
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
  int64_t num_entries = 0;
  for (const Lookup& lookup : lookups) {
    const auto table = static_cast<size_t>(lookup.table);
    const Placement placement = tables[table].placement;
    const bool any_key_is_right =
        indices[table] != nullptr && placement.num_rows == Placement::kAnyKey && placement.num_ranks == 1;
    if (lookup.keys.size > 0 && !any_key_is_right) {
      items.push_back({lookup.keys.data, lookup.slots, num_entries, placement, lookup.id.number, lookup.keys.is_64bit,
                       nullptr, 0, 0});
      num_entries += lookup.keys.size;
    }
    if (lookup.row_splits != nullptr && any_index(indices)) {
      items.push_back({nullptr, nullptr, num_entries, placement, lookup.id.number, false, lookup.row_splits,
                       lookup.num_bags, lookup.keys.size});
      num_entries += lookup.num_bags + 1;
    }
  }
  if (!items.empty()) {
    Upload upload;
    const size_t place = upload.add(items);
    upload.send(scope);
    SOK_LAUNCH(locate_kernel, ceil_div(num_entries, kThreads), scope.stream(), upload.at<Item>(place),
               static_cast<uint32_t>(items.size()), num_entries, report.errors());
  }
  report.finish(tables);
  ask_indices(context, indices, lookups, flags);
}

}  // namespace sok::cuda
