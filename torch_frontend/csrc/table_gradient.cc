// SPDX-License-Identifier: Apache-2.0
#include "table_gradient.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>

#include "context.h"
#include "status.h"
#include "views.h"

namespace sok_torch {
namespace {

using Weak = c10::weak_intrusive_ptr<TableGradient>;

// Guards the entries of all. Entries are freed outside: a tensor's end may need Python's lock, whose holder may be
// waiting for this one.
std::mutex mutex;
std::unordered_map<int64_t, Weak> by_number;
std::atomic<int64_t> next_number{0};

std::vector<c10::intrusive_ptr<TableGradient>> lock_all(const std::vector<Weak>& gradients) {
  std::vector<c10::intrusive_ptr<TableGradient>> result;
  result.reserve(gradients.size());
  for (const Weak& gradient : gradients) result.push_back(gradient.lock());
  return result;
}

c10::intrusive_ptr<TableGradient> make(std::vector<Entry> entries, at::Tensor unread) {
  auto result = c10::make_intrusive<TableGradient>(std::move(entries), std::move(unread));
  const std::lock_guard<std::mutex> lock(mutex);
  by_number.emplace(result->number(), Weak(result));
  return result;
}

// One summand of rows, which is the caller's to change.
std::vector<Entry> entry_of_rows(const std::string& name, const at::Tensor& slots, const at::Tensor& values,
                                 bool unique, const TableGradient::Indexed& indexed) {
  std::vector<at::Tensor> copies;
  sok_gradient summand = SOK_GRADIENT_INIT;
  summand.slots = view(slots, "slots", &copies);
  summand.values = view_of_rows(values, "gradient", &copies);
  if (unique) summand.flags |= SOK_GRADIENT_UNIQUE;
  if (indexed.has_value()) summand.generation = (*indexed)->generation();
  Borrowed tensors;
  tensors.keep({slots, values});
  tensors.keep(copies);
  Names names;
  names.push_back(name);
  auto call = c10::make_intrusive<CallGradient>(std::move(names), std::vector<sok_gradient>{summand},
                                                std::vector<int64_t>{0, 1}, std::move(tensors));
  return {{std::move(call), 0, 1.0}};
}

// Rows of float32 in memory of the device. Without being told which one, PyTorch asks CUDA whose the memory is, and
// CUDA does not know that of no rows.
at::Tensor rows_in(void* memory, at::IntArrayRef sizes, at::IntArrayRef strides, at::Device device) {
  return at::for_blob(memory, sizes)
      .strides(strides)
      .target_device(device)
      .options(at::TensorOptions().dtype(at::kFloat).device(device))
      .make_tensor();
}

// A copy of the values of a summand, multiplied.
sok_tensor scaled(const sok_tensor& values, double factor, at::Device device, std::vector<at::Tensor>* kept) {
  const int64_t stride = values.row_stride != 0 ? values.row_stride : values.shape[1];
  const at::Tensor given = rows_in(values.data, {values.shape[0], values.shape[1]}, {stride, 1}, device);
  kept->push_back(given.mul(factor).contiguous());
  return view(kept->back(), "gradient");
}

struct ByIndex {
  bool operator()(c10::Device a, c10::Device b) const { return a.index() < b.index(); }
};

struct Unread {
  at::Tensor table;
  TableGradient::Indexed indexed;
  c10::intrusive_ptr<TableGradient> gradient;
  std::vector<Entry> entries;
  Summands summands;
};

// The core's reduce. Of the table it reads the shape alone: that of now, if it may have grown since the lookups.
void reduce_into(const Context& context, const char* name, int64_t num_slots, const TableGradient::Indexed& indexed,
                 const Summands& summands, const sok_tensor& slots, const sok_tensor& values, const sok_tensor& count) {
  sok_columns table = SOK_COLUMNS_INIT;
  if (indexed.has_value()) {
    table = (*indexed)->columns(nullptr);
    if (table.since.data != nullptr) num_slots = table.since.shape[0];
  }
  table.name = name;
  table.weight = {count.data, SOK_FLOAT32, 2, {num_slots, values.shape[1]}, 0};  // any address will do
  SOK_CALL(sok_reduce(context.get(), &table, static_cast<int32_t>(summands.views.size()), summands.views.data(), slots,
                      values, count));
}

// Rows of memory from element *first on, which is moved behind them, to where vectors of 16 bytes begin.
sok_tensor next_rows(const at::Tensor& memory, int64_t rows, int64_t columns, int64_t* first) {
  sok_tensor result = view(memory, "memory");
  result.data = static_cast<char*>(result.data) + *first * static_cast<int64_t>(memory.itemsize());
  result.rank = 2;
  result.shape[0] = rows;
  result.shape[1] = columns;
  *first += (rows * columns + 3) / 4 * 4;
  return result;
}

// Becomes one summand of distinct slots for each gradient, all of one call. -> their values and zeros between them.
at::Tensor reduce_together(c10::Device device, const std::vector<Unread>& gradients) {
  int64_t num_slots = 0, num_values = 0;
  for (const Unread& each : gradients) {
    const int64_t entries = each.summands.num_entries();
    num_slots += (entries + 3) / 4 * 4;
    num_values += (entries * each.table.size(1) + 3) / 4 * 4;
  }
  const at::TensorOptions int64 = at::TensorOptions().dtype(at::kLong).device(device);
  const auto number = static_cast<int64_t>(gradients.size());
  const at::Tensor slots = at::empty({num_slots}, int64), counts = at::zeros({number}, int64),
                   values = at::zeros({num_values}, int64.dtype(at::kFloat));
  Names names;
  names.reserve(gradients.size());
  std::vector<sok_gradient> reduced(gradients.size(), SOK_GRADIENT_INIT);
  std::vector<int64_t> first(gradients.size() + 1);
  int64_t next_slot = 0, next_value = 0;
  const Context context(device);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const Unread& each = gradients[i];
    const int64_t entries = each.summands.num_entries();
    names.push_back(each.entries[0].call->name(each.entries[0].position));
    reduced[i].flags = SOK_GRADIENT_UNIQUE;
    reduced[i].slots = next_rows(slots, entries, 1, &next_slot);
    reduced[i].slots.rank = 1;
    reduced[i].values = next_rows(values, entries, each.table.size(1), &next_value);
    first[i + 1] = static_cast<int64_t>(i) + 1;
    sok_tensor count = view(counts, "counts");
    count.data = counts.data_ptr<int64_t>() + i;
    count.shape[0] = 1;
    reduce_into(context, names.get(i).c_str(), each.table.size(0), each.indexed, each.summands, reduced[i].slots,
                reduced[i].values, count);
    if (each.indexed.has_value()) reduced[i].generation = (*each.indexed)->generation();
  }
  const at::Tensor on_host = counts.cpu();
  for (size_t i = 0; i < gradients.size(); ++i) {
    sok_gradient& summand = reduced[i];
    summand.slots.shape[0] = summand.values.shape[0] = on_host.const_data_ptr<int64_t>()[i];
    if (const double scale = gradients[i].summands.scale; scale != 1.0) {
      const int64_t rows = summand.values.shape[0], columns = summand.values.shape[1];
      rows_in(summand.values.data, {rows, columns}, {columns, 1}, device).mul_(scale);
    }
  }
  Borrowed tensors;
  tensors.keep({slots, values});
  const auto call =
      c10::make_intrusive<CallGradient>(std::move(names), std::move(reduced), std::move(first), std::move(tensors));
  for (size_t i = 0; i < gradients.size(); ++i) gradients[i].gradient->replace({{call, i, 1.0}});
  return values;
}

}  // namespace

void check(at::ArrayRef<Entry> entries, const CallGradient** last) {
  for (const Entry& entry : entries) {
    if (entry.call.get() == *last) continue;
    entry.call->check(entry.position);
    *last = entry.call.get();
  }
}

Summands summands_of(at::ArrayRef<Entry> entries, at::Device device) {
  Summands result{{}, entries.empty() ? 1.0 : entries[0].scale, {}};
  for (const Entry& entry : entries) {
    const at::ArrayRef<sok_gradient> summands = entry.call->summands(entry.position);
    for (sok_gradient summand : summands) {
      if (entry.scale != result.scale) {
        if (result.scale != 1.0) {  // those so far have a factor of their own each from now on
          for (sok_gradient& earlier : result.views) {
            earlier.values = scaled(earlier.values, result.scale, device, &result.kept);
          }
          result.scale = 1.0;
        }
        if (entry.scale != 1.0) summand.values = scaled(summand.values, entry.scale, device, &result.kept);
      }
      result.views.push_back(summand);
    }
  }
  return result;
}

int64_t Summands::num_entries() const {
  int64_t result = 0;
  for (const sok_gradient& summand : views) result += summand.slots.shape[0];
  return result;
}

TableGradient::TableGradient(std::vector<Entry> entries, at::Tensor unread)
    : number_(next_number++), unread_(std::move(unread)), entries_(std::move(entries)) {}

void TableGradient::release_resources() {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    by_number.erase(number_);
  }
  entries_.clear();
  reduced_.reset();
  unread_.reset();
}

c10::intrusive_ptr<TableGradient> TableGradient::of_table(at::Tensor unread) {
  TORCH_CHECK_VALUE(unread.is_cpu() && unread.scalar_type() == at::kLong && unread.numel() == 1,
                    "unread must be [1] int64 on the CPU");
  return make({}, std::move(unread));
}

c10::intrusive_ptr<TableGradient> TableGradient::of_entries(std::vector<Entry> entries) {
  return make(std::move(entries), at::Tensor());
}

c10::intrusive_ptr<TableGradient> TableGradient::of_rows(const std::string& name, const at::Tensor& slots,
                                                         const at::Tensor& values, bool unique,
                                                         const Indexed& indexed) {
  auto result = of_entries(entry_of_rows(name, slots, values, unique, indexed));
  if (unique && slots.scalar_type() == at::kLong) result->reduced_ = Rows(slots, values);
  return result;
}

c10::intrusive_ptr<TableGradient> TableGradient::take() {
  auto result = copy();
  clear();
  return result;
}

c10::intrusive_ptr<TableGradient> TableGradient::copy() const {
  std::vector<Entry> entries;
  std::optional<Rows> reduced;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    entries = entries_;
    reduced = reduced_;
  }
  const CallGradient* checked = nullptr;
  check(entries, &checked);
  auto result = of_entries(std::move(entries));
  result->reduced_ = std::move(reduced);
  return result;
}

c10::intrusive_ptr<TableGradient> TableGradient::find(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = by_number.find(number);
  auto result = found == by_number.end() ? c10::intrusive_ptr<TableGradient>() : found->second.lock();
  TORCH_CHECK(result.defined(), "there is no gradient of the number ", number, " any more");
  return result;
}

std::vector<Weak> find_gradients(const std::vector<int64_t>& numbers) {
  std::vector<Weak> result;
  result.reserve(numbers.size());
  for (const int64_t number : numbers) result.emplace_back(TableGradient::find(number));
  return result;
}

void TableGradient::count() {
  if (unread_.defined()) *unread_.mutable_data_ptr<int64_t>() = static_cast<int64_t>(entries_.size());
}

void TableGradient::leave(const std::vector<Weak>& gradients, const std::vector<size_t>& positions,
                          const c10::intrusive_ptr<CallGradient>& call, double scale) {
  const auto locked = lock_all(gradients);
  const std::lock_guard<std::mutex> lock(mutex);
  for (const size_t position : positions) {
    const auto& gradient = locked.at(position);
    if (!gradient.defined()) continue;
    gradient->entries_.push_back({call, position, scale});
    gradient->count();
  }
}

std::vector<bool> TableGradient::have_entries(const std::vector<Weak>& gradients) {
  const auto locked = lock_all(gradients);
  std::vector<bool> result;
  result.reserve(locked.size());
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& gradient : locked) result.push_back(gradient.defined() && !gradient->entries_.empty());
  return result;
}

std::pair<std::vector<Entry>, std::vector<size_t>> TableGradient::entries_of(const std::vector<Weak>& gradients,
                                                                             const std::vector<int64_t>& given,
                                                                             const std::vector<int64_t>& others) {
  auto locked = lock_all(gradients);
  for (size_t i = 0; i < given.size(); ++i) locked.at(given[i]) = find(others.at(i));
  std::pair<std::vector<Entry>, std::vector<size_t>> result;
  auto& [entries, first] = result;
  entries.reserve(locked.size());
  first.reserve(locked.size() + 1);
  first.push_back(0);
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& gradient : locked) {
    if (gradient.defined()) entries.insert(entries.end(), gradient->entries_.begin(), gradient->entries_.end());
    first.push_back(entries.size());
  }
  return result;
}

void TableGradient::forget(const std::vector<Weak>& gradients) {
  const auto locked = lock_all(gradients);
  std::vector<std::vector<Entry>> freed(gradients.size());
  const std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i < locked.size(); ++i) {
    if (!locked[i].defined()) continue;
    locked[i]->entries_.swap(freed[i]);
    locked[i]->reduced_.reset();  // or the next entry would be taken for what these were reduced to
    locked[i]->count();
  }
}

std::vector<Entry> TableGradient::entries() const {
  const std::lock_guard<std::mutex> lock(mutex);
  return entries_;
}

std::tuple<int64_t, int64_t> TableGradient::sizes() const {
  int64_t summands = 0, slots = 0;
  for (const Entry& entry : entries()) {
    for (const sok_gradient& summand : entry.call->summands(entry.position)) {
      ++summands;
      slots += summand.slots.shape[0];
    }
  }
  return {summands, slots};
}

void TableGradient::set(std::vector<Entry> entries, std::optional<Rows> reduced) {
  const std::lock_guard<std::mutex> lock(mutex);
  entries_.swap(entries);  // freed by the caller
  reduced_.swap(reduced);
  count();
}

void TableGradient::add(int64_t number, double factor) {
  std::vector<Entry> others = find(number)->entries();
  for (Entry& entry : others) entry.scale *= factor;
  const std::lock_guard<std::mutex> lock(mutex);
  entries_.insert(entries_.end(), others.begin(), others.end());
  count();
}

void TableGradient::scale(double factor) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (Entry& entry : entries_) entry.scale *= factor;
}

bool TableGradient::is_reduced() const {
  const std::lock_guard<std::mutex> lock(mutex);
  return reduced_.has_value() && entries_.size() == 1;
}

TableGradient::Rows TableGradient::reduce(std::string name, int64_t num_slots, int64_t dimension, at::Device device,
                                          const Indexed& indexed) {
  const at::NoGradGuard no_grad;
  std::vector<Entry> entries;
  std::optional<Rows> reduced;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    entries = entries_;
    if (entries.size() == 1) reduced = reduced_;
  }
  if (reduced.has_value()) {
    if (entries[0].scale == 1.0) return *reduced;
    std::get<1>(*reduced) = std::get<1>(*reduced).mul(entries[0].scale);
  } else {
    const CallGradient* checked = nullptr;
    check(entries, &checked);
    const Summands summands = summands_of(entries, device);
    const int64_t num_entries = summands.num_entries();
    const at::TensorOptions int64 = at::TensorOptions().dtype(at::kLong).device(device);
    at::Tensor slots = at::empty({num_entries}, int64),
               values = at::empty({num_entries, dimension}, int64.dtype(at::kFloat));
    if (!summands.views.empty()) {
      const at::Tensor number = at::empty({1}, int64);
      const Context context(device);
      reduce_into(context, name.c_str(), num_slots, indexed, summands, view(slots, "slots"), view(values, "values"),
                  view(number, "count"));
      const auto n = number.item<int64_t>();
      slots = slots.narrow(0, 0, n);
      values = values.narrow(0, 0, n);
      if (summands.scale != 1.0) values.mul_(summands.scale);
    }
    reduced = Rows(slots, values);
  }
  set(entry_of_rows(name, std::get<0>(*reduced), std::get<1>(*reduced), true, indexed), reduced);
  return *reduced;
}

std::tuple<std::vector<at::Tensor>, std::vector<int64_t>> TableGradient::reduce_unread(
    const std::vector<int64_t>& numbers, const std::vector<at::Tensor>& tables) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(tables.size() == numbers.size(), "each gradient has a table");
  std::vector<int64_t> others;
  std::map<c10::Device, std::vector<Unread>, ByIndex> unread;
  const CallGradient* checked = nullptr;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const at::Tensor& table = tables[i];
    auto gradient = find(numbers[i]);
    std::vector<Entry> entries = gradient->entries();
    if (entries.empty() || table.grad().defined()) {
      others.push_back(static_cast<int64_t>(i));
      continue;
    }
    check(entries, &checked);
    Indexed indexed;
    if (auto found = IndexedTable::of(table); found.defined()) indexed = std::move(found);
    Summands summands = summands_of(entries, table.device());
    unread[table.device()].push_back(
        {table, std::move(indexed), std::move(gradient), std::move(entries), std::move(summands)});
  }
  std::vector<at::Tensor> values;
  for (const auto& [device, gradients] : unread) values.push_back(reduce_together(device, gradients));
  return {std::move(values), std::move(others)};
}

}  // namespace sok_torch
