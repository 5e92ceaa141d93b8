// SPDX-License-Identifier: Apache-2.0
// Views of tensors, tables and lookups for the core. They borrow: the object that made them must outlive the call.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <string>
#include <vector>

#include "sok/gradient.h"
#include "sok/lookup.h"
#include "sok/table.h"

namespace sok_torch {

constexpr sok_tensor kAbsent = SOK_NO_TENSOR;

// The sok_dtype. Throws ValueError naming `what` where there is none.
int32_t core_dtype(at::ScalarType dtype, const char* what);

// A view of a contiguous tensor of rank <= 2. Throws ValueError naming `what` when it is of another kind.
sok_tensor view(const at::Tensor& tensor, const char* what);

// As above; a tensor that is not contiguous is copied into *owner first.
sok_tensor view(const at::Tensor& tensor, const char* what, std::vector<at::Tensor>* owner);

// As above for [rows, columns] that may be columns of a wider tensor: those are not copied.
sok_tensor view_of_rows(const at::Tensor& tensor, const char* what, std::vector<at::Tensor>* owner);

// What the stages before the slots are known take: one entry a table, as the schemas in library.cc spell them. Names
// are those of the list, which must live as long.
std::vector<sok_placement> placements_of(const c10::List<std::string>& names, at::IntArrayRef owners,
                                         at::IntArrayRef num_rows, at::IntArrayRef dimensions, int64_t num_ranks,
                                         int64_t rank);

// What the stages after it take: this rank's rows of a table, which must be 2-D, and of all tables of a call. by_key:
// the positions of those whose rows are found by key (sok_columns). Throws ValueError for a tensor that is not of that
// kind, or not as many as names.
sok_columns make_columns(const at::Tensor& table, const char* name);
std::vector<sok_columns> make_columns(at::TensorList tables, const c10::List<std::string>& names,
                                      at::IntArrayRef by_key = {});

// Where they are; throws ValueError when there are none, or on several devices.
c10::Device device_of(at::TensorList tensors);

// The columns of each table, which must be 2-D.
std::vector<int64_t> dimensions_of(at::TensorList tables);

// The lookups of a call: one entry a lookup in `keys`, `tables` (positions) and `combiners`; row splits only for the
// lookups named in `bagged`, weights only for those named in `weighted`.
struct LookupArguments {
  at::TensorList keys;
  at::IntArrayRef tables;
  at::IntArrayRef combiners;
  at::TensorList row_splits;
  at::IntArrayRef bagged;
  at::TensorList weights;
  at::IntArrayRef weighted;
};

class Lookups {
 public:
  explicit Lookups(const LookupArguments& arguments);

  int32_t size() const { return static_cast<int32_t>(lookups_.size()); }
  const sok_lookup* data() const { return lookups_.data(); }
  int64_t num_bags(size_t i) const;
  // How many members of a stack each has (0: its table is none), and those of all in turn; nullptr where they are not
  // read. Throws ValueError for bags that are not as many for each. `members` is borrowed.
  void set_members(at::IntArrayRef counts, const sok_member* members);
  // The bags of each member, or of the table.
  int64_t batch(size_t i) const { return num_bags(i) / std::max(1, lookups_[i].num_members); }
  // The width of each output.
  std::vector<int64_t> widths(at::IntArrayRef dimensions) const;
  // Of the keys of each table, where these are slots that were located; empty: they are not.
  void set_generations(at::IntArrayRef generations);
  // Throws ValueError unless all lookups have as many bags, as outputs side by side must.
  void check_equal_bags() const;
  // Allocates one output for each lookup, [bags, dimension of its table] float32, those of members of a stack side by
  // side; concat: one for all, which holds them side by side.
  std::vector<at::Tensor> allocate_outputs(at::IntArrayRef dimensions, bool concat, const at::TensorOptions& options);

 private:
  std::vector<at::Tensor> owned_;
  std::vector<sok_lookup> lookups_;
};

// Columns of a [rows, columns] tensor, without a copy where its rows are contiguous: of the given widths, which must
// fill it. They share its memory and its count of changes in place, but are no views to autograd.
std::vector<at::Tensor> columns_of(const at::Tensor& tensor, at::IntArrayRef widths);

// Views of output gradients, one for each lookup; an absent one stays absent. Throws ValueError where they are not as
// many.
class OutputGradients {
 public:
  OutputGradients(const c10::List<std::optional<at::Tensor>>& given, const Lookups& lookups);

  const sok_tensor* data() const { return views_.data(); }

 private:
  std::vector<at::Tensor> owned_;
  std::vector<sok_tensor> views_;
};

// Room for the gradients of the weights of those lookups that `weighted` names.
struct WeightGradients {
  WeightGradients(at::TensorList weights, at::IntArrayRef weighted, const Lookups& lookups);

  std::vector<at::Tensor> results;  // one for each of the weights
  std::vector<sok_tensor> views;    // one a lookup
};

}  // namespace sok_torch
