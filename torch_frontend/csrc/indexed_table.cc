// SPDX-License-Identifier: Apache-2.0
#include "indexed_table.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "context.h"
#include "sok/lookup.h"
#include "status.h"
#include "views.h"

namespace sok_torch {

IndexedTable::IndexedTable(int64_t index, at::Tensor memory)
    : device_(memory.device()), index_(reinterpret_cast<const sok_index*>(index)), memory_(std::move(memory)) {
  TORCH_CHECK_VALUE(index_ != nullptr && memory_.dim() == 2 && memory_.is_contiguous(),
                    "a table with an index has rows [slots, dimension]");
}

const IndexedTable::Hold* IndexedTable::hold_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().data_ptr().cast_context<Hold>(&IndexedTable::release) : nullptr;
}

c10::intrusive_ptr<IndexedTable> IndexedTable::of(const at::Tensor& tensor) {
  const Hold* const hold = hold_of(tensor);
  return hold == nullptr ? c10::intrusive_ptr<IndexedTable>() : hold->table;
}

IndexedTable::Use::Use(const IndexedTable& table, bool changes) : tables_{&table}, changes_(changes) { lock(); }

IndexedTable::Use::Use(at::TensorList tables, bool changes) : changes_(changes) {
  for (const at::Tensor& tensor : tables) {
    if (const Hold* const hold = hold_of(tensor)) tables_.push_back(hold->table.get());
  }
  std::sort(tables_.begin(), tables_.end(), std::less<>());
  tables_.erase(std::unique(tables_.begin(), tables_.end()), tables_.end());
  lock();
}

void IndexedTable::Use::lock() {
  const std::thread::id self = std::this_thread::get_id();
  std::erase_if(tables_, [self](const IndexedTable* table) { return table->holder_ == self; });
  for (const IndexedTable* const table : tables_) {
    if (changes_) {
      table->use_.lock();
      table->holder_ = self;
    } else {
      table->use_.lock_shared();
    }
  }
}

IndexedTable::Use::~Use() {
  for (const IndexedTable* const table : tables_) {
    if (changes_) {
      table->holder_ = std::thread::id();
      table->use_.unlock();
    } else {
      table->use_.unlock_shared();
    }
  }
}

Turn::Turn(std::vector<at::Tensor> tables) : tables_(std::move(tables)) { use_.emplace(tables_, true); }

void Turn::end() { use_.reset(); }

void IndexedTable::release(void* hold) {
  const std::unique_ptr<Hold> owned(static_cast<Hold*>(hold));
  owned->table->released(owned->column);
}

at::Tensor IndexedTable::over(void* memory, at::IntArrayRef sizes, at::ScalarType dtype, size_t column) {
  auto hold = std::make_unique<Hold>(Hold{c10::intrusive_ptr<IndexedTable>::reclaim_copy(this), column});
  return at::for_blob(memory, sizes)
      .context(hold.release(), &IndexedTable::release)
      .target_device(device_)
      .options(at::TensorOptions().dtype(dtype).device(device_))
      .make_tensor();
}

at::Tensor IndexedTable::rows() { return over(memory_.data_ptr(), memory_.sizes(), memory_.scalar_type(), 0); }

sok_columns IndexedTable::columns(const char* name) const {
  sok_columns result = SOK_COLUMNS_INIT;
  result.name = name;
  result.weight = view(memory_, name == nullptr ? "table" : name);
  return result;
}

void IndexedTable::read(const sok_context* context, sok_tensor keys, at::Tensor rows) const {
  at::Tensor slots = at::empty({keys.shape[0]}, at::TensorOptions().dtype(at::kLong).device(device_));
  const sok_index_request request = {index(), keys, slots.mutable_data_ptr<int64_t>()};
  SOK_CALL(index()->locate(context, 1, &request, 0));
  at::index_select_out(rows, memory_, 0, slots);
}

void IndexedTable::check_keys(const at::Tensor&, const char*) const {}

at::Tensor IndexedTable::locate(const at::Tensor& keys, bool insert) {
  TORCH_CHECK_VALUE(keys.dim() == 1, "keys must be 1-D, not ", keys.dim(), "-D");
  std::vector<at::Tensor> copies;
  at::Tensor slots = at::empty({keys.size(0)}, at::TensorOptions().dtype(at::kLong).device(device_));
  const sok_index_request request = {index(), view(keys, "keys", &copies), slots.mutable_data_ptr<int64_t>()};
  if (keys.size(0) == 0) return slots;
  const Use use(*this, insert);
  const Context context(device_, Earlier::kRaised);
  const uint32_t flags = insert ? SOK_LOCATE_INSERT | SOK_LOCATE_BESIDE : 0;
  SOK_CALL_GROWING(device_, index()->locate(context.get(), 1, &request, flags));
  if (insert) grown();
  return slots;
}

}  // namespace sok_torch
