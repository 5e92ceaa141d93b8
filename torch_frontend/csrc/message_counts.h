// SPDX-License-Identifier: Apache-2.0
// Where everything lies in what the ranks of a call send each other (docs/ARCHITECTURE.md, "Rows and sums in one
// call").
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "sok/types.h"

namespace sok_torch {

// Elements of the arrays of messages, [arrays][ranks]. The message of a rank holds its section of each array, one after
// the other.
using Sections = std::vector<std::vector<int64_t>>;

// How much travels between this rank and each of the others, in one direction.
struct MessageCounts {
  // counts: [ranks, tables + 2 * lookups] int64 on the CPU, as they were swapped. dimensions: of each table; positions:
  // of the table of each lookup. Throws ValueError for numbers that cannot be.
  MessageCounts(const at::Tensor& counts, at::IntArrayRef dimensions, at::IntArrayRef positions);

  size_t num_ranks() const { return keys_of_rows.size(); }
  bool pooled() const { return any_pooled; }
  Sections in_keys() const { return {keys_of_rows, keys_of_bags, splits_of_bags}; }
  Sections in_rows() const { return {elements_of_rows, elements_of_sums}; }

  std::vector<int64_t> rows;    // [ranks * tables]: the unique keys of lookups whose rows travel
  std::vector<int64_t> keys;    // [ranks * lookups]: the keys of lookups that are pooled at the owner
  std::vector<int64_t> splits;  // [ranks * lookups]: their row splits, one more than bags; 0 where there are no parts
  bool any_pooled = false;      // at the owner
  // By rank.
  std::vector<int64_t> keys_of_rows, keys_of_bags, splits_of_bags, elements_of_rows, elements_of_sums;
};

// The sum of all sections for each rank.
std::vector<int64_t> totals(const Sections& sections);

// The messages to all ranks, one after the other, from arrays that are each by rank. An array may be longer than its
// sections, and undefined where they are empty. Of one array alone the result is no copy.
at::Tensor join(const std::vector<at::Tensor>& arrays, const Sections& sections);

// The arrays, each by rank, of the messages from all ranks.
std::vector<at::Tensor> split(const at::Tensor& messages, const Sections& sections);

// Elements [first, first + size) of a 1-D array of float32 or int64.
sok_tensor range(const sok_tensor& array, int64_t first, int64_t size);

}  // namespace sok_torch
