// SPDX-License-Identifier: Apache-2.0
#include "table/dynamic_table.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "api/dispatch.h"
#include "api/on_device.h"
#include "common/call.h"
#include "common/memory.h"
#include "common/status.h"
#include "common/tensor.h"

namespace {

using namespace sok;  // NOLINT: of this file only

int64_t nanoseconds_now() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

int64_t nanoseconds(double seconds) { return static_cast<int64_t>(std::min(seconds, 9e9) * 1e9); }

// Addresses are reserved for so many.
int64_t max_guests(int64_t capacity) { return std::max(capacity, int64_t{1} << 20); }

DynamicTable& table_of(const sok_index_request& request) { return *static_cast<DynamicTable*>(request.index->self); }

using RequestsOfTables = std::map<DynamicTable*, std::vector<HashRequest>>;

// Which keys may be inserted: requests[i].allowed of tables that do not admit all; `memory` is theirs. Returns those.
RequestsOfTables admit(const sok_context& context, const std::vector<DynamicTable*>& tables, uint32_t flags,
                       std::vector<HashRequest>& requests, Buffer<uint8_t>& memory) {
  const bool filters = (flags & SOK_LOCATE_FILTER) != 0;
  const auto decides = [&](size_t i) {
    return (flags & SOK_LOCATE_ADMIT) != 0 && tables[i]->admission() != nullptr &&
           tables[i]->admission()->decides(filters);
  };
  RequestsOfTables of_tables;
  int64_t num_keys = 0;
  for (size_t i = 0; i < tables.size(); ++i) num_keys += decides(i) ? requests[i].keys.size : 0;
  memory = Buffer<uint8_t>(context, num_keys);
  uint8_t* next = memory.data();
  for (size_t i = 0; i < tables.size(); ++i) {
    if (!decides(i)) continue;
    requests[i].allowed = next;
    next += requests[i].keys.size;
    of_tables[tables[i]].push_back(requests[i]);
  }
  for (const auto& [table, asked] : of_tables) {
    SOK_DISPATCH(context, hash_find, asked);
    table->admission()->decide(context, asked, table->generation(), filters);
  }
  return of_tables;
}

// Keys have their slots then, and what was there before, evicted rows, still is.
void insert_keys(const sok_context& context, std::vector<HashRequest>& requests,
                 const std::vector<DynamicTable*>& tables, uint32_t flags) {
  // Before anything is inserted, and for as many slots as the call may take, since it is not known yet what is new.
  std::map<DynamicTable*, int64_t> num_keys;
  for (size_t i = 0; i < tables.size(); ++i) num_keys[tables[i]] += requests[i].keys.size;
  for (const auto& [table, n] : num_keys) table->make_room_for(context, n);
  for (const auto& [table, n] : num_keys) table->begin(context, n, flags);
  Buffer<uint8_t> allowed;
  const RequestsOfTables admitted = admit(context, tables, flags, requests, allowed);
  SOK_DISPATCH(context, hash_find_or_insert, requests);
  for (const auto& [table, n] : num_keys) table->end(n);
  for (const auto& [table, asked] : admitted) table->admission()->forget_admitted(context, asked);
  for (HashRequest& request : requests) request.allowed = nullptr;  // its memory goes
}

void insert(const sok_context& context, std::vector<HashRequest> requests, const std::vector<DynamicTable*>& tables,
            uint32_t flags) {
  insert_keys(context, requests, tables, flags);
  bring_rows(context, tables, requests);
  std::vector<NewRows> rows;
  for (size_t i = 0; i < tables.size(); ++i) tables[i]->add_new_rows(requests[i], rows);
  SOK_DISPATCH(context, initialize_new, rows);
  for (DynamicTable* const table : tables) table->end_beside();
}

void locate(const sok_context& context, int32_t num_requests, const sok_index_request* requests, uint32_t flags) {
  const bool inserts = (flags & SOK_LOCATE_INSERT) != 0;
  const int64_t num_keys = check_number_of_keys(num_requests, requests);
  std::vector<HashRequest> asked;
  std::vector<DynamicTable*> tables;
  for (int32_t i = 0; i < num_requests; ++i) {
    const sok_device device = table_of(requests[i]).index().device();
    SOK_CHECK(context.device.type == device.type && context.device.index == device.index, "table '",
              table_of(requests[i]).index().name(), "' is on another device than the call");
    table_of(requests[i]).index().join(context);
  }
  const Buffer<uint8_t> is_new(context, inserts ? num_keys : 0);
  int64_t first = 0;
  for (int32_t i = 0; i < num_requests; ++i) {
    const sok_tensor& keys = requests[i].keys;
    tables.push_back(&table_of(requests[i]));
    asked.push_back({&tables.back()->index(),
                     {keys.data, keys.shape[0], keys.dtype == SOK_INT64},
                     requests[i].slots,
                     inserts ? is_new.data() + first : nullptr,
                     inserts ? tables.back()->eviction() : nullptr});
    first += keys.shape[0];
  }
  if (inserts) {
    insert(context, std::move(asked), tables, flags);
  } else {
    SOK_DISPATCH(context, hash_find, asked);
  }
}

int locate_keys(const sok_context* context, int32_t num_requests, const sok_index_request* requests, uint32_t flags) {
  return guarded(__func__, [&]() {
    on_device(*context, [&](const sok_context& full) { locate(full, num_requests, requests, flags); });
  });
}

}  // namespace

int64_t sok_dynamic_table::Column::bytes_of(int64_t slots) const {
  const int64_t bytes = width * dtype_size(dtype);
  SOK_CHECK_STATUS(SOK_RESOURCE_EXHAUSTED, slots <= INT64_MAX / 4 / bytes, slots, " slots of ", bytes,
                   " bytes do not fit the address space");
  return slots * bytes;
}

sok_dynamic_table::sok_dynamic_table(const sok_dynamic_table_config& config)
    : index_(
          make_hash_index(config.index, Admission::refuses(config.admission) ? max_guests(config.index.capacity) : 0)),
      time_to_live_(config.time_to_live),
      times_(nanoseconds(config.time_to_live > 0 ? std::min(1.0, config.time_to_live / 64) : 1.0)),
      seam_{sizeof(sok_index), this, locate_keys} {
  if (Admission::refuses(config.admission)) admission_ = std::make_unique<Admission>(config);
#ifdef SOK_WITH_CUDA
  const int64_t in_host = index_->most_slots() - config.device_rows;
  if (index_->device().type == SOK_CUDA && config.device_rows > 0 && in_host > 0) {
    tiers_ = cuda::make_tiers(config.device_rows, reserve(Tiers::bytes_of_bits(in_host)));
    index_->set_tiers(tiers_.get());
  }
#endif
  columns_.push_back(make_column(static_cast<sok_dtype>(config.dtype), config.dimension, config.initializer));
  since_ = reserve(index_->most_slots() * kSinceBytes);
  if (config.eviction != SOK_EVICT_NOTHING || config.time_to_live > 0 || tiers_ != nullptr) {
    eviction_ = make_eviction(index_->device(), static_cast<sok_eviction>(config.eviction), config.half_life,
                              index_->capacity(), index_->most_slots(),
                              reserve(index_->most_slots() * int64_t{sizeof(int64_t)}));
  }
  grow(config.index.initial_rows);
}

sok_dynamic_table::Column sok_dynamic_table::make_column(sok_dtype dtype, int64_t width,
                                                         const sok_initializer& initializer) const {
  Column column = {nullptr, dtype, width, initializer};
  column.memory =
      reserve(column.bytes_of(index_->most_slots()), tiers_ != nullptr ? column.bytes_of(tiers_->device_rows()) : 0);
  return column;
}

std::unique_ptr<ReservedRange> sok_dynamic_table::reserve(int64_t bytes, int64_t device_bytes) const {
  const std::string name = "table '" + index_->name() + "'";
  return reserve_range({sizeof(sok_reserved_range_config), index_->device(), bytes, name.c_str(), device_bytes});
}

int64_t sok_dynamic_table::bytes() const {
  int64_t bytes = index_->bytes() + since_->backed_bytes() + (eviction_ != nullptr ? eviction_->bytes() : 0) +
                  (admission_ != nullptr ? admission_->bytes() : 0) + (tiers_ != nullptr ? tiers_->bytes() : 0);
  for (const Column& column : columns_) bytes += column.memory->backed_bytes();
  return bytes;
}

int32_t sok_dynamic_table::add_column(const sok_context& context, sok_dtype dtype, int64_t width, double initial) {
  sok_initializer initializer = SOK_INITIALIZER_INIT;
  initializer.a = initial;
  Column column = make_column(dtype, width, initializer);
  // As many slots as the others, so that growing begins alike.
  const int64_t slots = columns_[0].memory->backed_bytes() / columns_[0].bytes_of(1);
  column.memory->grow(column.bytes_of(std::min(slots, index_->most_slots())));
  const InitialRows rows = {{nullptr, index_->num_slots(), true}, 0, 0, column.num_floats(), column.floats()};
  SOK_DISPATCH(context, initialize, initializer, rows);
  columns_.push_back(std::move(column));
  return num_columns() - 1;
}

sok_tensor sok_dynamic_table::column(int32_t number) const {
  const Column& column = columns_[static_cast<size_t>(number)];
  return {column.memory->data(), column.dtype, 2, {index_->num_slots(), column.width}, 0};
}

sok_columns sok_dynamic_table::columns() const {
  const sok_tensor rows = column(0);
  const sok_tensor since = {since_->data(), SOK_INT32, 1, {rows.shape[0], 0}, 0};
  auto* const owner = const_cast<sok_dynamic_table*>(this);
  return {sizeof(sok_columns), index_->name().c_str(), rows, since, freed_, owner, nullptr};
}

int64_t sok_dynamic_table::backed_slots() const {
  int64_t slots = since_->backed_bytes() / kSinceBytes;
  for (const Column& column : columns_) slots = std::min(slots, column.memory->backed_bytes() / column.bytes_of(1));
  return slots;
}

void sok_dynamic_table::grow(int64_t slots) {
  since_->grow(slots * kSinceBytes);
  for (const Column& column : columns_) column.memory->grow(column.bytes_of(slots));
  if (eviction_ != nullptr) eviction_->grow(slots);
  if (tiers_ != nullptr) tiers_->grow(slots);
  index_->limit_slots(backed_slots());
}

void sok_dynamic_table::make_room_for(const sok_context& context, int64_t n) {
  const auto wanted = [&]() { return std::min(index_->num_slots() + n, index_->most_slots()); };
  const auto grow_for = [&]() { grow(wanted()); };
  // Memory of the host takes long to get, and the device may have given out fewer slots than its host has counted.
  if (tiers_ != nullptr && wanted() > backed_slots()) index_->hear(context, backed_slots() - n);
  try {
    grow_for();
  } catch (const Error& error) {
    // A device may have given out fewer slots than its host has counted: it is worth waiting to see.
    if (error.code() != SOK_RESOURCE_EXHAUSTED) throw;
    index_->size(context);
    grow_for();
  }
}

void sok_dynamic_table::advance(const sok_context& context) {
  if (is_at_last_generation()) number_anew(context);
  ++generation_;
}

void sok_dynamic_table::number_anew(const sok_context& context) {
  int64_t* const scores = eviction_ != nullptr ? eviction_->scores() : nullptr;
  SOK_DISPATCH(context, lower_generations, index_->name().c_str(), kNumberedLower, index_->num_slots(), since(),
               scores);
  was_numbered_anew_ = true;
  generation_ -= kNumberedLower;
  freed_ = std::max<int64_t>(0, freed_ - kNumberedLower);
  times_.lower_generations(kNumberedLower);
  if (eviction_ != nullptr) eviction_->lower_generations(context, kNumberedLower);
}

void sok_dynamic_table::begin(const sok_context& context, int64_t num_keys, uint32_t flags) {
  advance(context);
  if (time_to_live_ > 0) expire(context, std::clamp<int64_t>(2 * num_keys, 1024, kMaxEntries));
  if (eviction_ != nullptr) times_.record(generation_, nanoseconds_now());  // nobody else knows of last uses
  // Guests of the running step stay while there is room for as many more as the call has keys.
  const int64_t guests = step_is_over_ ? 0 : std::max<int64_t>(0, index_->max_guests() - num_keys);
  if (index_->release_guests(context, guests, since())) freed_ = generation_;
  if ((flags & SOK_LOCATE_BESIDE) == 0) step_is_over_ = false;
  if (eviction_ != nullptr) eviction_->begin(context, generation_, index_->num_slots());
}

int64_t sok_dynamic_table::generation_before(double seconds) const {
  return times_.begun_at(nanoseconds_now() - nanoseconds(seconds));
}

void sok_dynamic_table::set_use_times(const sok_use_time* times, int64_t n) {
  SOK_CHECK(eviction_ != nullptr || n == 0, "table '", index_->name(), "' keeps no last uses");
  for (int64_t i = 0; i < n; ++i) {
    const bool ascends =
        i == 0 || (times[i - 1].generation < times[i].generation && times[i - 1].time <= times[i].time);
    SOK_CHECK(ascends && times[i].generation >= 0, "table '", index_->name(), "': times[", i, "] does not ascend");
    SOK_CHECK(times[i].generation <= kMostGenerations, "table '", index_->name(), "': times[", i, "] is of generation ",
              times[i].generation, ", and the most is ", kMostGenerations);
  }
  times_.clear();
  for (int64_t i = 0; i < n; ++i) times_.record(times[i].generation, times[i].time);
  if (n > 0) go_on_from(times[n - 1].generation);
}

void sok_dynamic_table::expire(const sok_context& context, int64_t n) {
  const int64_t last = generation_before(time_to_live_), num_slots = index_->num_slots();
  if (last == 0 || num_slots == 0) return;
  const int64_t first = next_to_expire_ < num_slots ? next_to_expire_ : 0;
  const int64_t looks = std::min(n, num_slots);
  n = std::min(looks, num_slots - first);
  next_to_expire_ = first + n;
  expire_among(context, first, n, last);
  if (n < looks) {  // also where the table grows in every call old rows have their turn
    next_to_expire_ = std::min(looks - n, first);
    expire_among(context, 0, next_to_expire_, last);
  }
}

void sok_dynamic_table::expire_among(const sok_context& context, int64_t first, int64_t n, int64_t last) {
  const Buffer<uint8_t> is_old(context, n);
  if (!eviction_->find_unused(context, first, n, last, index_->next_slot(), is_old.data())) return;
  const Buffer<int64_t> slots(context, n);
  HashRequest request = {index_.get(), {index_->keys() + first, n, true}, slots.data(), nullptr};
  request.asked = is_old.data();
  request.expires = true;
  erase_now(context, request);
}

void sok_dynamic_table::end(int64_t num_keys) {
  num_lookups_ += num_keys;
  if (eviction_ != nullptr) freed_ = std::max(freed_, eviction_->freed());
}

void sok_dynamic_table::add_new_rows(const HashRequest& request, std::vector<NewRows>& rows) const {
  for (const Column& column : columns_) {
    rows.push_back(
        {request.keys, request.slots, request.is_new, column.initializer, column.num_floats(), column.floats()});
    if (&column == columns_.data()) rows.back().since = {since(), static_cast<int32_t>(generation_)};
  }
}

void sok_dynamic_table::find_or_insert(const sok_context& context, const Integers& keys, int64_t* slots,
                                       const uint8_t* asked) {
  const Buffer<uint8_t> is_new(context, keys.size);
  HashRequest request = {index_.get(), keys, slots, is_new.data(), eviction_.get()};
  request.asked = asked;
  insert(context, {request}, {this}, SOK_LOCATE_INSERT);
}

void sok_dynamic_table::erase(const sok_context& context, const Integers& keys, int64_t* slots, const uint8_t* asked) {
  advance(context);
  HashRequest request = {index_.get(), keys, slots, nullptr};
  request.asked = asked;
  erase_now(context, request);
}

void sok_dynamic_table::erase_now(const sok_context& context, const HashRequest& request) {
  const std::vector<HashRequest> requests = {request};
  SOK_DISPATCH(context, hash_erase, requests);
  freed_ = generation_;
  SOK_DISPATCH(context, set_generations, request.slots, request.keys.size, {since(), kNoKey});
  if (eviction_ != nullptr) eviction_->forget(context, request.slots, request.keys.size);
}

// Scores of later generations come from another table, or from this one as it was: it goes on from the latest.
void sok_dynamic_table::set_scores(const sok_context& context, const int64_t* slots, const int64_t* scores, int64_t n) {
  SOK_CHECK(eviction_ != nullptr, "table '", index_->name(), "' evicts nothing, and has no scores");
  const int64_t latest = eviction_->set(context, index_->name().c_str(), index_->num_slots(), slots, scores, n);
  if (latest > generation_) go_on_from(latest);
}

void sok_dynamic_table::go_on_from(int64_t generation) {
  generation_ = std::max(generation_, generation);
  eviction_->go_on_from(generation_);
}

sok_dynamic_table_counts sok_dynamic_table::counts() const {
  sok_dynamic_table_counts counts = {sizeof(sok_dynamic_table_counts),
                                     num_lookups_,
                                     before_shrink_.insertions + index_->num_insertions(),
                                     before_shrink_.evictions + index_->num_evictions(),
                                     before_shrink_.refusals + index_->num_guests_ever(),
                                     before_shrink_.expirations + index_->num_expirations(),
                                     0,
                                     0,
                                     0};
  if (tiers_ != nullptr) tiers_->add_counts(counts);
  return counts;
}

void sok_dynamic_table::begin_ahead(const sok_context& context) {
  advance(context);
  times_.record(generation_, nanoseconds_now());
  eviction_->begin(context, generation_, index_->num_slots());
}

void sok_dynamic_table::clear(const sok_context& context) {
  advance(context);
  SOK_DISPATCH(context, set_generations, nullptr, index_->num_slots(), {since(), kNoKey});
  if (eviction_ != nullptr) eviction_->forget_all(context, index_->num_slots());
  if (admission_ != nullptr) admission_->clear(context);
  index_->clear(context);
  times_.clear();  // nothing knows of the generations before
  freed_ = generation_;
}

void sok_dynamic_table::read(const sok_context& context, const Integers& keys, void* rows) const {
  SOK_DISPATCH(context, find_rows, *index_, rows_of_table(), initializer(), keys, rows);
}

void sok_dynamic_table::read_and_evict(const sok_context& context, const Integers& keys, void* rows,
                                       const Evicted& evicted) {
  const Buffer<int64_t> slots(context, keys.size);
  const Buffer<uint8_t> is_new(context, keys.size);
  std::vector<HashRequest> requests = {{index_.get(), keys, slots.data(), is_new.data(), eviction_.get()}};
  requests[0].marks_repeats = true;
  Buffer<int64_t> evicted_slots;
  int64_t before = 0;
  const auto num_evictions = [&]() {
    if (eviction_ != nullptr) index_->size(context);  // so that the host knows of them
    return index_->num_evictions();
  };
  if (evicted.count != nullptr) {
    evicted_slots = Buffer<int64_t>(context, keys.size);
    requests[0].evicted_keys = evicted.keys;
    requests[0].evicted_slots = evicted_slots.data();
    before = num_evictions();
  }
  insert_keys(context, requests, {this}, SOK_LOCATE_INSERT | SOK_LOCATE_BESIDE);
  if (evicted.count != nullptr) {
    *evicted.count = num_evictions() - before;
    read_at(context, {evicted.keys, *evicted.count, true}, evicted_slots.data(), evicted.rows);
  }
  bring_rows(context, {this}, requests);
  std::vector<NewRows> columns;
  add_new_rows(requests[0], columns);
  SOK_DISPATCH(context, initialize_and_read, columns[0], rows);
  columns.erase(columns.begin());
  SOK_DISPATCH(context, initialize_new, columns);
  end_beside();
}

void sok_dynamic_table::read_at(const sok_context& context, const Integers& keys, const int64_t* slots,
                                void* rows) const {
  SOK_DISPATCH(context, read_rows, rows_of_table(), initializer(), keys, slots, rows);
}

sok::Columns sok_dynamic_table::rows_of_table() const {
  Columns table;
  table.name = index_->name().c_str();
  table.dimension = dimension();
  table.weight = {columns_[0].memory->data(), columns_[0].dtype};
  table.num_slots = index_->num_slots();
  return table;
}
