// SPDX-License-Identifier: Apache-2.0
#include "dynamic_table.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "context.h"
#include "lookup_node.h"
#include "status.h"
#include "views.h"

namespace sok_torch {

DynamicTable::DynamicTable(std::string name, at::Device device, int64_t capacity, int64_t initial_rows,
                           int64_t dimension, at::ScalarType dtype, at::ScalarType key_type, int64_t kind, int64_t seed,
                           double a, double b, const std::vector<double>& policy)
    : IndexedTable(device), key_type_(key_type) {
  sok_dynamic_table_config config = SOK_DYNAMIC_TABLE_CONFIG_INIT;
  config.index.device = {device.is_cuda() ? SOK_CUDA : SOK_CPU, device.is_cuda() ? device.index() : 0};
  config.index.capacity = capacity;
  config.index.initial_rows = initial_rows;
  config.index.name = name.c_str();
  config.dimension = dimension;
  config.dtype = core_dtype(dtype, "a dynamic table");
  config.initializer.kind = static_cast<int32_t>(kind);
  config.initializer.seed = static_cast<uint64_t>(seed);
  config.initializer.a = a;
  config.initializer.b = b;
  config.eviction = static_cast<int32_t>(policy.at(0));
  config.half_life = static_cast<int64_t>(policy.at(1));
  config.admission = {static_cast<int64_t>(policy.at(2)), static_cast<int64_t>(policy.at(3)), policy.at(4)};
  config.time_to_live = policy.at(5);
  config.device_rows = static_cast<int64_t>(policy.at(6));
  SOK_CALL_GROWING(device, sok_dynamic_table_create(&config, &table_));
  columns_.push_back({dimension, 0, dtype, false, {}});
}

void DynamicTable::release_resources() {
  if (table_ == nullptr) return;
  try {
    // What was enqueued may still use its memory.
    if (device_.is_cuda()) c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
  } catch (...) {  // the process ends, and CUDA did before
  }
  sok_dynamic_table_destroy(std::exchange(table_, nullptr));
}

void DynamicTable::released(size_t column) {
  const std::lock_guard<std::mutex> lock(mutex_);
  columns_[column].held = false;
  columns_[column].tensors.clear();
}

at::Tensor DynamicTable::rows() {
  TORCH_CHECK(!columns_[0].held, "the rows of a dynamic table are one parameter's");
  return tensor_of(0);
}

at::Tensor DynamicTable::add_column(int64_t width, double initial, at::ScalarType dtype) {
  const Use use(*this, true);
  const auto fits = [&](const Column& column) {
    return !column.held && column.width == width && column.initial == initial && column.dtype == dtype;
  };
  for (size_t i = 1; i < columns_.size(); ++i) {
    if (fits(columns_[i])) {
      at::Tensor tensor = tensor_of(i);
      return tensor.fill_(initial);
    }
  }
  const Context context(device_);
  int32_t number = 0;
  SOK_CALL_GROWING(device_, sok_dynamic_table_add_column(context.get(), table_, core_dtype(dtype, "a column"),
                                                         std::max<int64_t>(width, 1), initial, &number));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    columns_.push_back({width, initial, dtype, false, {}});
  }
  return tensor_of(static_cast<size_t>(number));
}

at::Tensor DynamicTable::tensor_of(size_t column) {
  Column& of = columns_[column];
  const sok_tensor memory = sok_dynamic_table_column(table_, static_cast<int32_t>(column));
  shown_ = memory.shape[0];
  std::vector<int64_t> sizes{shown_};
  if (of.width > 0) sizes.push_back(of.width);
  of.held = true;
  at::Tensor tensor = over(memory.data, sizes, of.dtype, column);
  follow(tensor);
  return tensor;
}

void DynamicTable::follow(const at::Tensor& tensor) {
  const Hold* const hold = hold_of(tensor);
  TORCH_CHECK_VALUE(hold != nullptr && hold->table.get() == this && tensor.dim() > 0 && tensor.is_contiguous(),
                    "the tensor is no column of the table");
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Weak>& tensors = columns_[hold->column].tensors;
  std::erase_if(tensors, [](const Weak& weak) { return weak.expired(); });
  tensors.emplace_back(tensor.getIntrusivePtr());
}

void DynamicTable::grown() {
  const int64_t slots = num_slots();
  if (slots == shown_) return;
  std::vector<at::Tensor> tensors;  // what may be the last reference to one must not end under the lock
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Column& column : columns_) {
      for (const Weak& weak : column.tensors) {
        if (at::Tensor tensor(weak.lock()); tensor.defined()) tensors.push_back(std::move(tensor));
      }
    }
  }
  for (const at::Tensor& tensor : tensors) {
    std::vector<int64_t> sizes = tensor.sizes().vec();
    sizes[0] = slots;
    const int64_t elements = slots * (sizes.size() > 1 ? sizes[1] : 1);
    tensor.storage().set_nbytes(static_cast<size_t>(elements) * tensor.itemsize());
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    follow_shape(tensor);
  }
  shown_ = slots;
}

sok_columns DynamicTable::columns(const char* name) const {
  sok_columns result = sok_dynamic_table_columns(table_);
  result.name = name;
  return result;
}

void DynamicTable::end_step() {
  const Use use(*this, true);
  check(sok_dynamic_table_end_step(table_));
}

void DynamicTable::read(const sok_context* context, sok_tensor keys, at::Tensor rows) const {
  SOK_CALL(sok_dynamic_table_read(context, table_, keys, view(rows, "rows")));
}

void DynamicTable::check_keys(const at::Tensor& keys, const char* name) const {
  TORCH_CHECK_TYPE(key_type_ == at::kLong || keys.scalar_type() == at::kInt, "ids of table '", name,
                   "' must be int32, its key_type, not int64");
}

std::tuple<at::Tensor, at::Tensor> DynamicTable::held(int64_t first, int64_t count) const {
  const Use use(*this, false);
  return held_of(table_, first, count < 0 ? num_slots() - first : count);
}

std::tuple<at::Tensor, at::Tensor> DynamicTable::held_of(const sok_dynamic_table* table, int64_t first,
                                                         int64_t slots) const {
  const at::TensorOptions int64 = at::TensorOptions().dtype(at::kLong).device(device_);
  at::Tensor keys = at::empty({slots}, int64), places = at::empty({slots}, int64), number = at::empty({1}, int64);
  const Context context(device_);
  check(sok_hash_index_export(context.get(), sok_dynamic_table_hash_index(table), first, view(keys, "keys"),
                              view(places, "slots"), view(number, "count")));
  const auto n = number.item<int64_t>();
  return {keys.narrow(0, 0, n), places.narrow(0, 0, n)};
}

int64_t DynamicTable::erase(const at::Tensor& keys) {
  at::Tensor slots = at::empty({keys.size(0)}, at::TensorOptions().dtype(at::kLong).device(device_));
  if (keys.size(0) == 0) return 0;
  const Use use(*this, true);
  {
    const Context context(device_, Earlier::kRaised);
    SOK_CALL_GROWING(device_, sok_dynamic_table_erase(context.get(), table_, view(keys, "keys"), view(slots, "slots")));
  }
  grown();
  return slots.ge(0).sum().item<int64_t>();
}

void DynamicTable::clear() {
  const Use use(*this, true);
  const Context context(device_);
  check(sok_dynamic_table_clear(context.get(), table_));
  grown();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> DynamicTable::read_and_evict(const at::Tensor& keys) {
  const Use use(*this, true);
  const at::TensorOptions options = at::TensorOptions().device(device_);
  const std::vector<int64_t> sizes = {keys.size(0), columns_[0].width};
  at::Tensor rows = at::empty(sizes, options.dtype(columns_[0].dtype));
  // To be told what went, the call waits for a GPU. A table without scores gives up nothing.
  const bool evicts = sok_dynamic_table_scores(table_).rank != 0;
  at::Tensor gone = at::empty({evicts ? sizes[0] : 0, sizes[1]}, rows.options());
  at::Tensor gone_keys = at::empty({evicts ? sizes[0] : 0}, options.dtype(at::kLong));
  int64_t count = 0;
  if (keys.size(0) > 0) {
    const Context context(device_, Earlier::kRaised);
    const sok_tensor none = SOK_NO_TENSOR;
    SOK_CALL_GROWING(device_, sok_dynamic_table_read_and_evict(
                                  context.get(), table_, view(keys, "keys"), view(rows, "rows"),
                                  evicts ? view(gone_keys, "evicted_keys") : none,
                                  evicts ? view(gone, "evicted_rows") : none, evicts ? &count : nullptr));
  }
  grown();
  return {rows, gone_keys.narrow(0, 0, count), gone.narrow(0, 0, count)};
}

void DynamicTable::set_epoch(int64_t epoch) {
  const Use use(*this, true);
  check(sok_dynamic_table_set_epoch(table_, epoch));
}

std::optional<at::Tensor> DynamicTable::scores() const {
  const sok_tensor scores = sok_dynamic_table_scores(table_);
  if (scores.rank == 0) return std::nullopt;
  const at::TensorOptions int64 = at::TensorOptions().dtype(at::kLong).device(device_);
  auto self = c10::intrusive_ptr<DynamicTable>::reclaim_copy(const_cast<DynamicTable*>(this));
  return at::for_blob(scores.data, {scores.shape[0]})
      .deleter([self = std::move(self)](void*) {})
      .target_device(device_)
      .options(int64)
      .make_tensor();
}

void DynamicTable::set_scores(const at::Tensor& slots, const at::Tensor& scores) {
  const Use use(*this, true);
  const Context context(device_);
  check(sok_dynamic_table_set_scores(context.get(), table_, view(slots, "slots"), view(scores, "scores")));
}

at::Tensor DynamicTable::candidates() const {
  const Use use(*this, false);
  const sok_dynamic_table* const waiting = sok_dynamic_table_candidates(table_);
  const at::TensorOptions int64 = at::TensorOptions().dtype(at::kLong);
  if (waiting == nullptr) return at::empty({0, 2}, int64);
  const auto [keys, slots] = held_of(waiting, 0, sok_dynamic_table_column(waiting, 0).shape[0]);
  const sok_tensor scores = sok_dynamic_table_scores(waiting);
  const at::Tensor all = at::from_blob(scores.data, {scores.shape[0]}, [](void*) {}, int64.device(device_), device_);
  return at::stack({keys, all.index_select(0, slots)}, 1).cpu();
}

void DynamicTable::set_candidates(const at::Tensor& pairs) {
  const Use use(*this, true);
  sok_dynamic_table* const waiting = sok_dynamic_table_candidates(table_);
  if (waiting == nullptr) return;
  const at::Tensor columns = pairs.t().contiguous().to(device_), slots = at::empty_like(columns[0]);
  const sok_tensor keys = view(columns[0], "keys");
  const sok_index* const index = sok_dynamic_table_as_index(waiting);
  const sok_index_request request = {index, keys, slots.mutable_data_ptr<int64_t>()};
  const Context context(device_);
  check(sok_dynamic_table_clear(context.get(), waiting));
  if (pairs.size(0) == 0) return;
  SOK_CALL_GROWING(device_, index->locate(context.get(), 1, &request, SOK_LOCATE_INSERT));
  check(sok_dynamic_table_set_scores(context.get(), waiting, view(slots, "slots"), view(columns[1], "scores")));
}

at::Tensor DynamicTable::use_times() const {
  const Use use(*this, false);
  const int64_t count = sok_dynamic_table_use_times(table_, 0, nullptr);
  at::Tensor pairs = at::empty({count, 2}, at::kLong);
  sok_dynamic_table_use_times(table_, count, static_cast<sok_use_time*>(pairs.mutable_data_ptr()));
  return pairs;
}

void DynamicTable::set_use_times(const at::Tensor& pairs) {
  const Use use(*this, true);
  check(
      sok_dynamic_table_set_use_times(table_, pairs.size(0), static_cast<const sok_use_time*>(pairs.const_data_ptr())));
}

int64_t DynamicTable::shrink() {
  const Use use(*this, true);
  int64_t freed = 0;
  {
    const Context context(device_, Earlier::kRaised);
    SOK_CALL_GROWING(device_, sok_dynamic_table_shrink(context.get(), table_, &freed));
  }
  grown();
  return freed;
}

int64_t DynamicTable::size() const {
  const Use use(*this, false);
  int64_t size = 0;
  const Context context(device_);
  check(sok_hash_index_size(context.get(), sok_dynamic_table_hash_index(table_), &size));
  return size;
}

std::vector<int64_t> DynamicTable::counts() const {
  const Use use(*this, false);
  sok_dynamic_table_counts counts = SOK_DYNAMIC_TABLE_COUNTS_INIT;
  check(sok_dynamic_table_get_counts(table_, &counts));
  return {counts.lookups,   counts.insertions,  counts.evictions,
          counts.refusals,  counts.expirations, counts.device_hits,
          counts.host_hits, counts.moves,       sok_dynamic_table_host_bytes(table_)};
}

void DynamicTable::prefetch(at::TensorList tables, at::TensorList keys) {
  TORCH_CHECK_VALUE(tables.size() == keys.size(), tables.size(), " tables and ", keys.size(), " tensors of keys");
  std::vector<sok_dynamic_table*> handles;
  std::vector<sok_tensor> views;
  for (size_t i = 0; i < tables.size(); ++i) {
    const auto* const table = dynamic_cast<DynamicTable*>(of(tables[i]).get());
    TORCH_CHECK_TYPE(table != nullptr, "tables[", i, "] is no dynamic table");
    handles.push_back(table->table_);
    views.push_back(view(keys[i], "keys"));
  }
  if (handles.empty()) return;
  const Use use(tables, true);
  const Context context(tables[0].device());
  SOK_CALL_GROWING(tables[0].device(), sok_dynamic_table_prefetch(context.get(), static_cast<int32_t>(handles.size()),
                                                                  handles.data(), views.data()));
}

}  // namespace sok_torch
