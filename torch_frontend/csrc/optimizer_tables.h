// SPDX-License-Identifier: Apache-2.0
// The tables of an optimizer, with the states that it keeps of them, from step to step (../table_step.py).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <cstddef>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "table_gradient.h"
#include "weak_tensors.h"

namespace sok_torch {

// torch.classes.sok.OptimizerTables. It keeps neither tables nor states alive: who calls it holds them.
class OptimizerTables final : public torch::CustomClassHolder {
 public:
  // gradients: the numbers of the tables' TableGradients; one name a table.
  OptimizerTables(std::vector<at::Tensor> tables, std::vector<int64_t> gradients, std::vector<std::string> names);

  // Which have a gradient: (positions; None: all; those among them that have a .grad).
  std::tuple<std::optional<std::vector<int64_t>>, std::vector<int64_t>> waiting() const;

  // Sets the gradients of all tables to None.
  void forget() const;

  // Tables that take the same step are a run. Says which those of run `run` are, by position, and their step counts, or
  // none. Runs that come after it are forgotten.
  void set_run(int64_t run, std::vector<int64_t> tables, std::vector<at::Tensor> counts);

  // Says where the states of a run are: of each kind of `keys` one a table, the first kind of all tables first;
  // rowwise: whether a kind has a number a row.
  void set_states(int64_t run, std::vector<std::string> keys, std::vector<int64_t> rowwise,
                  std::vector<at::Tensor> states);

  // Whether all of them are still there.
  bool has_states(int64_t run) const { return runs_.at(run).states.present(); }

  // The number that all step counts of a run hold; nothing where they do not, or are not float32 on the CPU.
  std::optional<double> common_count(int64_t run) const;

  // One step of these runs, in one call of the core a device: all tables or none change, with their states and, for the
  // runs in `counted`, step counts. kinds, flags, scales, and 13 settings (sparse_operation_kit.optimizers.FIELDS) are
  // those of each run; stamps: [slots] int64 of the tables at the positions `stamped`, set to `stamp` for the rows that
  // change.
  // gradients: numbers of the TableGradients of the tables at the positions `given`, in place of their own.
  // exchange: the number of the Exchange by which the ranks agree before a row changes, and whether to wait for that
  // (Exchange::agree); -1: there is one rank.
  // Throws ValueError for a state that does not fit, RuntimeError for a gradient whose tensors were overwritten, and as
  // Exchange::agree.
  void step(std::vector<int64_t> runs, std::vector<int64_t> kinds, std::vector<int64_t> flags,
            std::vector<double> settings, std::vector<double> scales, std::vector<int64_t> counted,
            std::vector<int64_t> given, std::vector<int64_t> gradients, std::vector<at::Tensor> stamps,
            std::vector<int64_t> stamped, int64_t stamp, int64_t exchange, bool wait) const;

 private:
  using Gradients = std::vector<c10::weak_intrusive_ptr<TableGradient>>;

  struct Run {
    std::vector<int64_t> tables;
    std::vector<std::string> keys;
    std::vector<int64_t> rowwise;
    WeakTensors states, counts;
  };

  void check_state(const Run& run, size_t kind, int64_t position, const at::Tensor& state) const;

  WeakTensors tables_;
  Gradients gradients_;
  std::vector<std::string> names_;
  std::vector<Run> runs_;
};

}  // namespace sok_torch
