// SPDX-License-Identifier: Apache-2.0
// number_keys: keys of the members of stacks -> keys of the stacks. Which member an entry belongs to is found in the
// row splits, where the members' bags begin: the host does not know how many keys each has.
#include "cuda/launch.h"
#include "cuda/placement.cuh"
#include "cuda/splits.cuh"
#include "cuda/stages.h"
#include "cuda/upload.h"
#include "cuda/vector.cuh"

namespace sok::cuda {
namespace {

struct MemberItem {
  int64_t first_key;
  int64_t num_rows;
  int32_t number;  // what a report calls it
};

struct LookupItem {
  const void* keys;
  int64_t* numbers;
  const int64_t* row_splits;  // nullptr: each key is a bag
  int64_t first_task;         // of its row splits, then of its keys, among those of the call
  int64_t num_splits;
  int64_t num_keys;
  int64_t batch;
  uint32_t first_member;
  uint32_t num_members;
  int32_t table;
  bool keys_64bit;
};

__global__ void __launch_bounds__(kThreads)
    number_keys_kernel(const LookupItem* items, uint32_t num_items, const MemberItem* members, int64_t num_tasks,
                       sok_error_record* errors) {
  const int64_t task = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (task >= num_tasks) return;
  const LookupItem& item =
      items[last_at_or_before(num_items, task, [&](uint32_t at) { return __ldg(&items[at].first_task); })];
  const int64_t i = task - item.first_task - item.num_splits;
  if (i < 0) {
    const int64_t bag = i + item.num_splits;
    if (!is_split(item.row_splits, bag, item.num_splits - 1, item.num_keys)) {
      report(errors, Fault::kRowSplits, item.table, bag, item.num_keys);
    }
    return;
  }
  // Wrong row splits are reported; here they only may not lead outside.
  const uint32_t at = last_at_or_before(item.num_members, i, [&](uint32_t number) {
    const int64_t bag = number * item.batch;
    return item.row_splits != nullptr ? __ldg(item.row_splits + bag) : bag;
  });
  const MemberItem& member = members[item.first_member + at];
  const int64_t key = load_integer(item.keys, item.keys_64bit, i);
  const bool is_inside = static_cast<uint64_t>(key) < static_cast<uint64_t>(member.num_rows);
  if (!is_inside) report(errors, Fault::kKey, member.number, key, member.num_rows);
  item.numbers[i] = is_inside ? member.first_key + key : -1;
}

}  // namespace

void number_keys(const sok_context& context, const std::vector<Lookup>& lookups) {
  const Scope scope(context);
  const Report report(scope);
  std::vector<LookupItem> items;
  std::vector<MemberItem> members;
  std::vector<TableId> names;
  int64_t num_tasks = 0;
  for (const Lookup& lookup : lookups) {
    const int64_t num_splits = lookup.row_splits != nullptr ? lookup.num_bags + 1 : 0;
    if (num_splits + lookup.keys.size == 0) continue;
    items.push_back({lookup.keys.data, lookup.slots, lookup.row_splits, num_tasks, num_splits, lookup.keys.size,
                     lookup.batch(), static_cast<uint32_t>(members.size()), static_cast<uint32_t>(lookup.num_members),
                     lookup.id.number, lookup.keys.is_64bit});
    num_tasks += num_splits + lookup.keys.size;
    // In a record of one call numbers need only differ from each other: those of the tables are not negative.
    names.push_back(lookup.id);
    for (int32_t m = 0; m < lookup.num_members; ++m) {
      const sok_member& member = lookup.members[m];
      const int32_t number = has_error_record(context) ? context.errors->keeper->names.number_of(name_of(member))
                                                       : -2 - static_cast<int32_t>(members.size());
      members.push_back({member.first_key, member.num_rows, number});
      names.push_back({name_of(member), number, lookup.id.dimension});
    }
  }
  if (!items.empty()) {
    Upload upload;
    const size_t items_place = upload.add(items), members_place = upload.add(members);
    upload.send(scope);
    SOK_LAUNCH(number_keys_kernel, ceil_div(num_tasks, kThreads), scope.stream(), upload.at<LookupItem>(items_place),
               static_cast<uint32_t>(items.size()), upload.at<MemberItem>(members_place), num_tasks, report.errors());
  }
  report.finish(names);
}

}  // namespace sok::cuda
