// SPDX-License-Identifier: Apache-2.0
// apply: the fused optimizers. Entries are grouped by slot, then each row and its states are read and written once.
#include "cpu/contents.h"
#include "cpu/gradients.h"
#include "cpu/stages.h"

namespace sok::cpu {
namespace {

int64_t bytes_per_row(const Update& update) {
  return update.table.dimension * (4 + 8 * update.num_states + 2 * update.table.weight.item_size());
}

// The slots have just been read: writing their stamps here costs little more than the stores.
void stamp(const Update& update, const UpdateTask& rows, int64_t begin, int64_t end) {
  if (update.stamps == nullptr) return;
  for (int64_t u = begin; u < end; ++u) {
    update.stamps[rows.slots32 != nullptr ? static_cast<int64_t>(rows.slots32[u]) : rows.slots64[u]] = update.stamp;
  }
}

}  // namespace

void apply(const sok_context& context, const std::vector<Update>& updates, const Agreement& agreement) {
  std::vector<GroupedGradients::Source> sources;
  sources.reserve(updates.size());
  for (const Update& update : updates) sources.push_back({&update.table, &update.gradients});
  const GroupedGradients gradients(context, sources, GroupedGradients::Slots::kAnyOrder);

  std::vector<UpdateTask> tasks;
  std::vector<int64_t> counts;
  int64_t max_dimension = 1, total = 0;
  for (size_t i = 0; i < updates.size(); ++i) {
    const Update& update = updates[i];
    const GroupedGradients::Result result = gradients[i];
    UpdateTask task = {};
    task.gradients = result.segments;
    task.slots32 = result.slots32;
    task.slots64 = result.slots64;
    task.weight = update.table.weight.data;
    task.dtype = update.table.weight.dtype;
    std::copy(update.states, update.states + SOK_MAX_STATES, task.states);
    task.constants = make_constants(update);
    tasks.push_back(task);
    max_dimension = std::max(max_dimension, update.table.dimension);
    counts.push_back(result.count);
    total += result.count * bytes_per_row(update);
  }
  const int64_t bytes = task_bytes(context, total);
  Chunks chunks;
  for (size_t i = 0; i < updates.size(); ++i) chunks.add(counts[i], items_per_task(bytes, bytes_per_row(updates[i])));
  const int64_t stride = 2 * scratch_row(max_dimension);
  const int64_t workers = std::min<int64_t>(num_workers(context), chunks.count());
  const Buffer<float> scratch(context, stride * workers);
  agreement.ask();
  parallel_for(context, chunks.count(), [&](int64_t task, int32_t worker) {
    const Chunks::Range range = chunks[task];
    const UpdateTask& rows = tasks[static_cast<size_t>(range.item)];
    kernels().update(rows, range.begin, range.end, scratch.data() + stride * worker);
    stamp(updates[static_cast<size_t>(range.item)], rows, range.begin, range.end);
  });
}

}  // namespace sok::cpu
