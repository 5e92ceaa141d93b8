// SPDX-License-Identifier: Apache-2.0
// A dynamic table of the core (sok/dynamic_table.h), whose columns are tensors that grow with it.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "indexed_table.h"
#include "sok/dynamic_table.h"

namespace sok_torch {

// torch.classes.sok.DynamicTable. What inserts keys, adds columns or uses tensors while their shapes change runs one at
// a time.
class DynamicTable final : public IndexedTable {
 public:
  // As in sok_dynamic_table_config; key_type: torch.int32 refuses keys of 64 bits in lookups.
  // policy: as Policy in sparse_operation_kit/dynamic.py.
  DynamicTable(std::string name, at::Device device, int64_t capacity, int64_t initial_rows, int64_t dimension,
               at::ScalarType dtype, at::ScalarType key_type, int64_t kind, int64_t seed, double a, double b,
               const std::vector<double>& policy);

  // The same object as what the stages know.
  c10::intrusive_ptr<IndexedTable> as_indexed() { return c10::intrusive_ptr<IndexedTable>::reclaim_copy(this); }

  // Whether the tensor's memory is one of its columns.
  bool has(const at::Tensor& tensor) const { return of(tensor).get() == this; }

  // [slots, dimension]: column 0. `grown` changes the shape of what is given to `follow`.
  at::Tensor rows();

  // A column that is added: [slots, width], or [slots] where width is 0, float32 or int64, `initial` everywhere. One
  // that nobody holds any more is used again.
  at::Tensor add_column(int64_t width, double initial, at::ScalarType dtype);

  // The first dimension of `tensor`, which is over a whole column, is the number of slots from now on.
  void follow(const at::Tensor& tensor);

  // See IndexedTable.
  void grown() override;
  const sok_index* index() const override { return sok_dynamic_table_as_index(table_); }
  sok_columns columns(const char* name) const override;
  int64_t generation() const override { return sok_dynamic_table_generation(table_); }
  void end_step() override;
  void read(const sok_context* context, sok_tensor keys, at::Tensor rows) const override;
  void check_keys(const at::Tensor& keys, const char* name) const override;

  // The keys among `count` slots from `first` on, and their slots, ascending by slot: [n] int64. -1: to the last.
  std::tuple<at::Tensor, at::Tensor> held(int64_t first, int64_t count) const;

  // Gives up keys -> how many of them it held. On a GPU it waits.
  int64_t erase(const at::Tensor& keys);

  // Gives up all keys. Tensors have no slots then.
  void clear();

  // sok_dynamic_table_read_and_evict: (rows of the keys [n, dimension], the keys of rows that were given up for them
  // [m], those rows [m, dimension]).
  std::tuple<at::Tensor, at::Tensor, at::Tensor> read_and_evict(const at::Tensor& keys);

  // sok_dynamic_table_set_epoch.
  void set_epoch(int64_t epoch);

  // sok_dynamic_table_scores, without a copy: [slots] int64 of now; nothing where nothing is evicted.
  std::optional<at::Tensor> scores() const;
  void set_scores(const at::Tensor& slots, const at::Tensor& scores);

  // [n, 2] int64 in host memory: the keys that wait for rows and their scores; and sok_dynamic_table_use_times.
  at::Tensor candidates() const;
  void set_candidates(const at::Tensor& pairs);
  at::Tensor use_times() const;
  void set_use_times(const at::Tensor& pairs);

  // sok_dynamic_table_shrink.
  int64_t shrink();

  int64_t size() const;
  // By which scores say when rows were used last: the generation of now, and the last that is known to have begun so
  // long ago; and the last before the running step.
  std::tuple<int64_t, int64_t, int64_t> generations(double seconds) const {
    return {generation(), sok_dynamic_table_generation_before(table_, seconds),
            sok_dynamic_table_running_since(table_)};
  }
  // (lookups, insertions, evictions, refusals, expirations, device_hits, host_hits, moves) of
  // sok_dynamic_table_get_counts, and sok_dynamic_table_host_bytes.
  std::vector<int64_t> counts() const;

  // sok_dynamic_table_prefetch of the tables that have these tensors' memory for a column; keys: one tensor a table.
  static void prefetch(at::TensorList tables, at::TensorList keys);
  int64_t num_slots() const { return sok_dynamic_table_column(table_, 0).shape[0]; }
  int64_t bytes() const { return sok_dynamic_table_bytes(table_); }

  // PyTorch calls the one where weak references are left, else the other alone.
  void release_resources() override;
  ~DynamicTable() override { release_resources(); }

 private:
  using Weak = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

  struct Column {
    int64_t width;  // 0: [slots]
    double initial;
    at::ScalarType dtype;
    bool held;  // by a tensor
    std::vector<Weak> tensors;
  };
  void released(size_t column) override;
  at::Tensor tensor_of(size_t column);
  // `held` of a table on the device.
  std::tuple<at::Tensor, at::Tensor> held_of(const sok_dynamic_table* table, int64_t first, int64_t slots) const;

  at::ScalarType key_type_;
  sok_dynamic_table* table_ = nullptr;
  int64_t shown_ = 0;  // the slots that tensors have
  std::mutex mutex_;   // of columns_
  std::vector<Column> columns_;
};

}  // namespace sok_torch
