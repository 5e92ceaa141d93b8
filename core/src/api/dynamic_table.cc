// SPDX-License-Identifier: Apache-2.0
// Entry points of sok/dynamic_table.h.
#include "table/dynamic_table.h"

#include <cmath>

#include "api/on_device.h"
#include "common/call.h"
#include "common/initializer.h"
#include "common/status.h"
#include "common/tensor.h"

using namespace sok;  // NOLINT: entry points only

namespace {

void check_device(const sok_context& context, const sok_dynamic_table* table) {
  SOK_CHECK(table != nullptr, "table is NULL");
  const sok_device device = table->index().device();
  SOK_CHECK(context.device.type == device.type && context.device.index == device.index,
            "context.device is another device than the table's");
}

// Calls body(context) for a call that uses the table: on its device, and after what brings rows ahead of a step.
template <typename Body>
void on_table(const sok_context& context, const sok_dynamic_table* table, Body&& body) {
  on_device(context, [&](const sok_context& full) {
    table->index().join(full);
    body(full);
  });
}

const char* name_of(const sok_dynamic_table* table) { return table->index().name().c_str(); }

Integers check_keys_of_call(const sok_dynamic_table* table, const sok_tensor& keys) {
  const Integers result = check_integers(keys, {"keys", -1, nullptr, name_of(table)}, kAnySize);
  SOK_CHECK(result.size <= kMaxEntries, "table '", name_of(table), "': ", result.size,
            " keys; a call takes fewer than 2^31");
  return result;
}

void check_admission(const sok_admission& admission) {
  SOK_CHECK(admission.threshold >= 0 && admission.threshold < INT32_MAX, "config.admission.threshold is ",
            admission.threshold, ", must be in [0, 2^31 - 2]");
  SOK_CHECK(admission.max_candidates >= 0 && admission.max_candidates <= kMaxHashRows,
            "config.admission.max_candidates is ", admission.max_candidates, ", must be in [0, 2^40]");
  SOK_CHECK(admission.filter_ratio >= 0 && admission.filter_ratio <= 1, "config.admission.filter_ratio is ",
            admission.filter_ratio, ", must be in [0, 1]");
}

}  // namespace

extern "C" int sok_dynamic_table_create(const sok_dynamic_table_config* config, sok_dynamic_table** table) {
  return SOK_ENTRY({
    SOK_CHECK(config != nullptr, "config is NULL");
    SOK_CHECK(table != nullptr, "table is NULL");
    SOK_CHECK(config->struct_size == sizeof(sok_dynamic_table_config), "config.struct_size is ", config->struct_size,
              ", must be ", sizeof(sok_dynamic_table_config));
    check_hash_index_config(config->index);
    const sok_device device = config->index.device;
    check_device(device);
    SOK_CHECK(config->dimension >= 1 && config->dimension <= INT32_MAX, "config.dimension is ", config->dimension,
              ", must be in [1, 2^31)");
    SOK_CHECK(config->dtype == SOK_FLOAT32 || config->dtype == SOK_FLOAT16 || config->dtype == SOK_BFLOAT16,
              "config.dtype is ", dtype_name(config->dtype), ", must be float32, float16 or bfloat16");
    check_initializer(config->initializer);
    SOK_CHECK(config->eviction >= SOK_EVICT_NOTHING && config->eviction <= SOK_EVICT_CUSTOMIZED, "config.eviction is ",
              config->eviction, ", which is no sok_eviction");
    SOK_CHECK(config->half_life >= 0, "config.half_life is ", config->half_life, ", must not be negative");
    check_admission(config->admission);
    SOK_CHECK(config->device_rows >= 0 && config->device_rows <= UINT32_MAX, "config.device_rows is ",
              config->device_rows, ", must be in [0, 2^32)");
    SOK_CHECK(config->time_to_live >= 0 && std::isfinite(config->time_to_live), "config.time_to_live is ",
              config->time_to_live, ", must be a number of seconds, or 0");
    on_device(device, [&]() { *table = std::make_unique<sok_dynamic_table>(*config).release(); });
  });
}

extern "C" int sok_dynamic_table_destroy(sok_dynamic_table* table) {
  return SOK_ENTRY({
    if (table != nullptr) on_device(table->index().device(), [&]() { delete table; });
  });
}

extern "C" const sok_index* sok_dynamic_table_as_index(const sok_dynamic_table* table) {
  return table != nullptr ? table->as_index() : nullptr;
}

extern "C" sok_hash_index* sok_dynamic_table_hash_index(const sok_dynamic_table* table) {
  return table != nullptr ? &table->index() : nullptr;
}

extern "C" int64_t sok_dynamic_table_generation(const sok_dynamic_table* table) {
  return table != nullptr ? table->generation() : 0;
}

extern "C" sok_columns sok_dynamic_table_columns(const sok_dynamic_table* table) {
  const sok_columns none = SOK_COLUMNS_INIT;
  return table != nullptr ? table->columns() : none;
}

extern "C" int sok_dynamic_table_erase(const sok_context* context, sok_dynamic_table* table, sok_tensor keys,
                                       sok_tensor slots) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    check_device(checked, table);
    const Integers key_view = check_keys_of_call(table, keys);
    int64_t* const out =
        checked_data<int64_t>(slots, {"slots", -1, nullptr, name_of(table)}, SOK_INT64, {key_view.size});
    on_table(checked, table, [&](const sok_context& full) { table->erase(full, key_view, out); });
  });
}

extern "C" int sok_dynamic_table_clear(const sok_context* context, sok_dynamic_table* table) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    check_device(checked, table);
    on_table(checked, table, [&](const sok_context& full) { table->clear(full); });
  });
}

extern "C" int sok_dynamic_table_shrink(const sok_context* context, sok_dynamic_table* table, int64_t* freed) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    check_device(checked, table);
    SOK_CHECK(freed != nullptr, "freed is NULL");
    on_table(checked, table, [&](const sok_context& full) { *freed = table->shrink(full); });
  });
}

extern "C" int sok_dynamic_table_prefetch(const sok_context* context, int32_t n, sok_dynamic_table* const* tables,
                                          const sok_tensor* keys) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    SOK_CHECK(n >= 0, "n is ", n, ", must not be negative");
    SOK_CHECK(n == 0 || (tables != nullptr && keys != nullptr), tables == nullptr ? "tables" : "keys", " is NULL");
    std::vector<Integers> views;
    for (int32_t i = 0; i < n; ++i) {
      check_device(checked, tables[i]);
      views.push_back(check_keys_of_call(tables[i], keys[i]));
    }
    on_device(checked, [&](const sok_context& full) { prefetch(full, {tables, tables + n}, views); });
  });
}

extern "C" int sok_dynamic_table_end_step(sok_dynamic_table* table) {
  return SOK_ENTRY({
    SOK_CHECK(table != nullptr, "table is NULL");
    table->end_step();
  });
}

extern "C" int sok_dynamic_table_set_epoch(sok_dynamic_table* table, int64_t epoch) {
  return SOK_ENTRY({
    SOK_CHECK(table != nullptr, "table is NULL");
    SOK_CHECK(epoch >= 0, "epoch is ", epoch, ", must not be negative");
    if (table->eviction() != nullptr) table->eviction()->set_epoch(epoch);
  });
}

extern "C" sok_tensor sok_dynamic_table_scores(const sok_dynamic_table* table) {
  if (table == nullptr || table->eviction() == nullptr) return SOK_NO_TENSOR;
  return {table->eviction()->scores(), SOK_INT64, 1, {table->index().num_slots(), 0}, 0};
}

extern "C" sok_dynamic_table* sok_dynamic_table_candidates(const sok_dynamic_table* table) {
  return table != nullptr && table->admission() != nullptr ? table->admission()->candidates() : nullptr;
}

extern "C" int64_t sok_dynamic_table_generation_before(const sok_dynamic_table* table, double seconds) {
  return table != nullptr ? table->generation_before(seconds) : 0;
}

extern "C" int64_t sok_dynamic_table_running_since(const sok_dynamic_table* table) {
  return table != nullptr && table->eviction() != nullptr ? table->eviction()->step() : 0;
}

extern "C" int64_t sok_dynamic_table_use_times(const sok_dynamic_table* table, int64_t size, sok_use_time* times) {
  if (table == nullptr) return 0;
  const std::vector<sok_use_time> known = table->use_times().known();
  const auto count = static_cast<int64_t>(known.size());
  if (times != nullptr) std::copy_n(known.begin(), std::clamp<int64_t>(size, 0, count), times);
  return count;
}

extern "C" int sok_dynamic_table_set_use_times(sok_dynamic_table* table, int64_t n, const sok_use_time* times) {
  return SOK_ENTRY({
    SOK_CHECK(table != nullptr, "table is NULL");
    SOK_CHECK(n >= 0, "n is ", n, ", must not be negative");
    SOK_CHECK(n == 0 || times != nullptr, "times is NULL");
    table->set_use_times(times, n);
  });
}

extern "C" int sok_dynamic_table_set_scores(const sok_context* context, sok_dynamic_table* table, sok_tensor slots,
                                            sok_tensor scores) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    check_device(checked, table);
    const auto* const places =
        checked_data<const int64_t>(slots, {"slots", -1, nullptr, name_of(table)}, SOK_INT64, {kAnySize});
    const int64_t n = slots.shape[0];
    const auto* const values =
        checked_data<const int64_t>(scores, {"scores", -1, nullptr, name_of(table)}, SOK_INT64, {n});
    on_table(checked, table, [&](const sok_context& full) { table->set_scores(full, places, values, n); });
  });
}

extern "C" int sok_dynamic_table_get_counts(const sok_dynamic_table* table, sok_dynamic_table_counts* counts) {
  return SOK_ENTRY({
    SOK_CHECK(table != nullptr, "table is NULL");
    SOK_CHECK(counts != nullptr, "counts is NULL");
    SOK_CHECK(counts->struct_size == sizeof(*counts), "counts.struct_size is ", counts->struct_size, ", must be ",
              sizeof(*counts));
    *counts = table->counts();
  });
}

extern "C" int sok_dynamic_table_add_column(const sok_context* context, sok_dynamic_table* table, int32_t dtype,
                                            int64_t width, double initial, int32_t* column) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    check_device(checked, table);
    SOK_CHECK(column != nullptr, "column is NULL");
    SOK_CHECK(dtype == SOK_FLOAT32 || dtype == SOK_INT64, "dtype is ", dtype_name(dtype), ", must be float32 or int64");
    SOK_CHECK(width >= 1 && width <= INT32_MAX, "width is ", width, ", must be in [1, 2^31)");
    SOK_CHECK(dtype == SOK_FLOAT32 || initial == 0, "initial is ", initial, ", must be 0 where dtype is int64");
    on_table(checked, table, [&](const sok_context& full) {
      *column = table->add_column(full, static_cast<sok_dtype>(dtype), width, initial);
    });
  });
}

extern "C" sok_tensor sok_dynamic_table_column(const sok_dynamic_table* table, int32_t column) {
  if (table == nullptr || column < 0 || column >= table->num_columns()) return SOK_NO_TENSOR;
  return table->column(column);
}

extern "C" int64_t sok_dynamic_table_host_bytes(const sok_dynamic_table* table) {
  return table != nullptr ? table->host_bytes() : 0;
}

extern "C" int64_t sok_dynamic_table_bytes(const sok_dynamic_table* table) {
  return table != nullptr ? table->bytes() : 0;
}

extern "C" int sok_dynamic_table_read(const sok_context* context, const sok_dynamic_table* table, sok_tensor keys,
                                      sok_tensor rows) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    check_device(checked, table);
    const Integers key_view = check_keys_of_call(table, keys);
    check_tensor(rows, {"rows", -1, nullptr, name_of(table)}, {table->column(0).dtype},
                 {key_view.size, table->dimension()});
    on_table(checked, table, [&](const sok_context& full) { table->read(full, key_view, rows.data); });
  });
}

extern "C" int sok_dynamic_table_read_and_evict(const sok_context* context, sok_dynamic_table* table, sok_tensor keys,
                                                sok_tensor rows, sok_tensor evicted_keys, sok_tensor evicted_rows,
                                                int64_t* num_evicted) {
  return SOK_ENTRY({
    const sok_context& checked = check_context(context);
    check_device(checked, table);
    const Integers key_view = check_keys_of_call(table, keys);
    const auto check_rows = [&](const sok_tensor& tensor, const char* field) {
      check_tensor(tensor, {field, -1, nullptr, name_of(table)}, {table->column(0).dtype},
                   {key_view.size, table->dimension()});
    };
    check_rows(rows, "rows");
    DynamicTable::Evicted evicted;
    if (num_evicted != nullptr) {
      check_rows(evicted_rows, "evicted_rows");
      evicted.keys = checked_data<int64_t>(evicted_keys, {"evicted_keys", -1, nullptr, name_of(table)}, SOK_INT64,
                                           {key_view.size});
      evicted.rows = evicted_rows.data;
      evicted.count = num_evicted;
    } else {
      SOK_CHECK(is_absent(evicted_keys) && is_absent(evicted_rows),
                "evicted_keys and evicted_rows are for num_evicted of their items, which is NULL");
    }
    on_table(checked, table,
             [&](const sok_context& full) { table->read_and_evict(full, key_view, rows.data, evicted); });
  });
}
