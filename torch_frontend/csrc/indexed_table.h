// SPDX-License-Identifier: Apache-2.0
// A table with an index (sok_index), as the stages see it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "sok/table.h"

namespace sok_torch {

// torch.classes.sok.IndexedTable. The memory of its tensors keeps it alive.
class IndexedTable : public torch::CustomClassHolder {
 public:
  // A table of which all keys have slots that they keep. index: the address of its sok_index, which must live as long
  // as the table; memory: [slots, dimension].
  IndexedTable(int64_t index, at::Tensor memory);

  // The table that has the tensor's memory for a column; null for other tensors.
  static c10::intrusive_ptr<IndexedTable> of(const at::Tensor& tensor);

  // [slots, dimension]: its rows, by which it is found.
  at::Tensor rows();

  virtual const sok_index* index() const { return index_; }

  // The rows as the stages after `locate` take them; and the generation of the slots that were located last.
  virtual sok_columns columns(const char* name) const;
  virtual int64_t generation() const { return 0; }

  // What a call holds of tables while it runs: one that changes them runs alone, others beside each other. Tensors
  // without an index are passed over, and tables that this thread has alone already.
  class Use {
   public:
    Use(const IndexedTable& table, bool changes);
    Use(at::TensorList tables, bool changes);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    void lock();

    std::vector<const IndexedTable*> tables_;  // each once, in the order in which everybody locks them
    const bool changes_;
  };

  // To be called after keys were inserted.
  virtual void grown() {}

  // To be called after a step that was not sok_apply's.
  virtual void end_step() {}

  // Rows [n, dimension] of keys [n], those that it does not hold too.
  virtual void read(const sok_context* context, sok_tensor keys, at::Tensor rows) const;

  // Throws TypeError unless lookups may have such keys.
  virtual void check_keys(const at::Tensor& keys, const char* name) const;

  // The slot of each key: of those that it does not hold -1, or with `insert` a new one.
  at::Tensor locate(const at::Tensor& keys, bool insert);

 protected:
  explicit IndexedTable(at::Device device) : device_(device) {}

  // What the memory of a column's tensors holds.
  struct Hold {
    c10::intrusive_ptr<IndexedTable> table;
    size_t column;
  };
  static const Hold* hold_of(const at::Tensor& tensor);
  // A tensor over a column's memory.
  at::Tensor over(void* memory, at::IntArrayRef sizes, at::ScalarType dtype, size_t column);
  // Nobody holds a tensor over this column any more.
  virtual void released(size_t) {}

  const at::Device device_;

 private:
  static void release(void* hold);

  mutable std::shared_mutex use_;                // held by Use alone
  mutable std::atomic<std::thread::id> holder_;  // the thread that has it alone
  const sok_index* index_ = nullptr;
  at::Tensor memory_;
};

// torch.classes.sok.Turn. From its making to end(), in the same thread, no other thread uses the tables: several calls
// of this one see and leave them as if they were one. Waits for its turn.
class Turn final : public torch::CustomClassHolder {
 public:
  explicit Turn(std::vector<at::Tensor> tables);

  void end();

 private:
  std::vector<at::Tensor> tables_;
  std::optional<IndexedTable::Use> use_;
};

}  // namespace sok_torch
