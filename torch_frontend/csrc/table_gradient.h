// SPDX-License-Identifier: Apache-2.0
// The gradient of one table: a list of what lookup calls left for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <cstddef>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "call_gradient.h"
#include "indexed_table.h"
#include "sok/gradient.h"
#include "sok/table.h"

namespace sok_torch {

// One summand of a table's gradient: `scale` times that of the table at this position of the call.
struct Entry {
  c10::intrusive_ptr<CallGradient> call;
  size_t position;
  double scale;
};

// Entries as the core takes them.
struct Summands {
  std::vector<sok_gradient> views;
  double scale;                  // of their sum
  std::vector<at::Tensor> kept;  // what `views` point to beside the entries

  int64_t num_entries() const;
};

// Throws RuntimeError where something that the entries borrow was changed. *last: a call that was looked at already.
void check(at::ArrayRef<Entry> entries, const CallGradient** last);

// Of the table on this device.
Summands summands_of(at::ArrayRef<Entry> entries, at::Device device);

// torch.classes.sok.TableGradient. Each table has one, of entries that nobody has looked at; ../gradient.py has one in
// each PendingGradient. Any thread may use it.
class TableGradient final : public torch::CustomClassHolder {
 public:
  using Rows = std::tuple<at::Tensor, at::Tensor>;  // slots [n] int64, values [n, dimension] float32

  // unread: [1] int64 on the CPU, which holds the number of entries from then on: Python reads it without a call.
  static c10::intrusive_ptr<TableGradient> of_table(at::Tensor unread);

  // Of a table that has an index, here and in `reduce`; else none.
  using Indexed = std::optional<c10::intrusive_ptr<IndexedTable>>;

  // slots [n], values [n, dimension] float32, which stay the caller's to change; unique: the slots ascend, and none
  // occurs twice. They are the slots that keys have now.
  static c10::intrusive_ptr<TableGradient> of_rows(const std::string& name, const at::Tensor& slots,
                                                   const at::Tensor& values, bool unique, const Indexed& indexed);

  static c10::intrusive_ptr<TableGradient> of_entries(std::vector<Entry> entries);

  // By which `find` knows it while it lives: PyTorch takes 20 us for an object like this among the arguments of a call.
  int64_t number() const { return number_; }
  static c10::intrusive_ptr<TableGradient> find(int64_t number);

  // Adds an entry to each of several. gone ones are left out.
  static void leave(const std::vector<c10::weak_intrusive_ptr<TableGradient>>& gradients,
                    const std::vector<size_t>& positions, const c10::intrusive_ptr<CallGradient>& call, double scale);

  // Whether each has entries.
  static std::vector<bool> have_entries(const std::vector<c10::weak_intrusive_ptr<TableGradient>>& gradients);

  // The entries of all, one after the other, and where those of each begin, and the end. Those that are gone have none;
  // in place of those at the positions `given` are those of the numbers `others`.
  static std::pair<std::vector<Entry>, std::vector<size_t>> entries_of(
      const std::vector<c10::weak_intrusive_ptr<TableGradient>>& gradients, const std::vector<int64_t>& given,
      const std::vector<int64_t>& others);

  // Empties them.
  static void forget(const std::vector<c10::weak_intrusive_ptr<TableGradient>>& gradients);

  std::vector<Entry> entries() const;
  // (summands, entries of these) for those who print it.
  std::tuple<int64_t, int64_t> sizes() const;
  void clear() { replace({}); }
  // Another one of the same entries. Throws RuntimeError where something that they borrow was changed.
  c10::intrusive_ptr<TableGradient> copy() const;
  // The same, and this one is empty then.
  c10::intrusive_ptr<TableGradient> take();
  // Adds the entries of the one of this number, `factor` times each.
  void add(int64_t number, double factor);
  void scale(double factor);
  // Whether it is one summand of distinct ascending slots, which is its own.
  bool is_reduced() const;
  // Becomes that. -> its rows, which may be changed. Waits for a GPU.
  // Slots are [0, num_slots) of the table of this name.
  Rows reduce(std::string name, int64_t num_slots, int64_t dimension, at::Device device, const Indexed& indexed);

  // `reduce` of all that tables, each given once, hold unread, in one call and with one wait for a GPU; they stay
  // unread. -> of each device the values of all, flat with zeros between them, which may be changed; and the positions
  // of the tables whose gradient is none or was read.
  static std::tuple<std::vector<at::Tensor>, std::vector<int64_t>> reduce_unread(const std::vector<int64_t>& numbers,
                                                                                 const std::vector<at::Tensor>& tables);

  void replace(std::vector<Entry> entries) { set(std::move(entries), std::nullopt); }

  // For make_intrusive; use the functions above.
  explicit TableGradient(std::vector<Entry> entries, at::Tensor unread);

  void release_resources() override;  // PyTorch's, when nobody but weak references is left

 private:
  void set(std::vector<Entry> entries, std::optional<Rows> reduced);
  void count();

  const int64_t number_;
  at::Tensor unread_;
  std::vector<Entry> entries_;
  std::optional<Rows> reduced_;  // what the only entry is made of
};

// Those of these numbers, which are not kept alive.
std::vector<c10::weak_intrusive_ptr<TableGradient>> find_gradients(const std::vector<int64_t>& numbers);

}  // namespace sok_torch
