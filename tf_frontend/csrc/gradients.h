// SPDX-License-Identifier: Apache-2.0
// Gradients that are not materialised, as inputs of an op: output gradients with their bags, and what came by exchange.
#ifndef SOK_TENSORFLOW_GRADIENTS_H_
#define SOK_TENSORFLOW_GRADIENTS_H_

#include <vector>

#include "support.h"

#define SOK_GRADIENT_INPUTS                            \
  Input("slots: slot_types")                           \
      .Input("values: num_values * float32")           \
      .Input("row_splits: num_summands * int64")       \
      .Input("weights: num_weighted * float32")        \
      .Input("exchanged_slots: num_groups * int64")    \
      .Input("exchanged_values: num_groups * float32") \
      .Input("exchanged_splits: num_groups * int64")   \
      .Input("exchanged_counts: num_groups * int64")   \
      .Input("generations: num_generations * int64")

#define SOK_GRADIENT_ATTRIBUTES                    \
  Attr("slot_types: list({int32, int64}) >= 0")    \
      .Attr("num_summands: int >= 0")              \
      .Attr("num_values: int >= 0")                \
      .Attr("num_weighted: int >= 0")              \
      .Attr("num_groups: int >= 0")                \
      .Attr("summand_tables: list(int) >= 0")      \
      .Attr("summand_values: list(int) >= 0")      \
      .Attr("summand_columns: list(int) >= 0")     \
      .Attr("summand_combiners: list(int) >= 0")   \
      .Attr("summand_weighted: list(bool) >= 0")   \
      .Attr("summand_unique: list(bool) >= 0")     \
      .Attr("group_sizes: list(int) >= 0")         \
      .Attr("column_tables: list(int) >= 0")       \
      .Attr("column_dimensions: list(int) >= 0")   \
      .Attr("group_lookups: list(int) >= 0")       \
      .Attr("lookup_columns: list(int) >= 0")      \
      .Attr("num_generations: int >= 0")           \
      .Attr("summand_members: list(int) = []")     \
      .Attr("summand_generations: list(int) = []") \
      .Attr("column_generations: list(int) = []")

#define SOK_GRADIENT_INPUTS_DOC                                                              \
  "slots: [n] rows that each summand adds to.\n"                                             \
  "values: [m, dimension] of a summand, or wider: of several.\n"                             \
  "row_splits: [m + 1] which entries take which value, or [0] when entry j takes value j.\n" \
  "weights: [n] for each summand that `summand_weighted` marks.\n"                           \
  "exchanged_slots: of each exchange: the slots that SokLocate gave.\n"                      \
  "exchanged_values: of each exchange: the messages of gradients that came.\n"               \
  "exchanged_splits: of each exchange: what SokLocate gave as `bag_splits`.\n"               \
  "exchanged_counts: of each exchange: what SokExchangeSizes had as `received`.\n"           \
  "generations: what SokInsert and SokLocate gave.\n"

#define SOK_GRADIENT_ATTRIBUTES_DOC                                                                                    \
  "summand_tables: position of each summand's table.\n"                                                                \
  "summand_values: position of each summand's values.\n"                                                               \
  "summand_columns: where the columns of each summand begin in them, or -1: they are its own.\n"                       \
  "summand_combiners: sok_combiner of each summand; read when it has row splits.\n"                                    \
  "summand_weighted: whether each summand has weights.\n"                                                              \
  "summand_unique: whether no slot occurs twice in the summand.\n"                                                     \
  "group_sizes: how many tables each exchange has.\n"                                                                  \
  "column_tables: of all exchanges: position of each of their tables, or -1 when it is not here.\n"                    \
  "column_dimensions: of all exchanges: elements a row of each of their tables.\n"                                     \
  "group_lookups: how many lookups each exchange has.\n"                                                               \
  "lookup_columns: of all exchanges: the position of each lookup's table in its exchange.\n"                           \
  "summand_members: how many members of a stack each summand has, side by side in its values; empty where none has.\n" \
  "summand_generations: place of each summand's generation among `generations`, or -1: its slots are those of now.\n"  \
  "column_generations: of all exchanges: the same of each of their tables. Either is empty where all are -1.\n"

namespace sok::tf {

class GradientAttributes {
 public:
  // dimensions: elements a row of each table.
  GradientAttributes(OpKernelConstruction* ctx, const std::vector<int64_t>& dimensions);

  // The summands of each table's gradient, as views of the op's inputs.
  absl::Status Read(OpKernelContext* ctx, std::vector<std::vector<sok_gradient>>* gradients) const;

 private:
  absl::Status ReadSummands(OpKernelContext* ctx, const std::vector<int64_t>& generations,
                            std::vector<std::vector<sok_gradient>>* gradients) const;
  absl::Status ReadExchanges(OpKernelContext* ctx, const std::vector<int64_t>& generations,
                             std::vector<std::vector<sok_gradient>>* gradients) const;

  std::vector<int64_t> dimensions_;
  std::vector<int64_t> summand_tables_;
  std::vector<int64_t> summand_values_;
  std::vector<int64_t> summand_columns_;
  std::vector<int64_t> summand_combiners_;
  std::vector<bool> summand_weighted_;
  std::vector<bool> summand_unique_;
  std::vector<int64_t> group_sizes_;
  std::vector<int64_t> column_tables_;
  std::vector<int64_t> column_dimensions_;
  std::vector<int64_t> group_lookups_;
  std::vector<int64_t> lookup_columns_;
  std::vector<int64_t> summand_members_;
  std::vector<int64_t> summand_generations_;
  std::vector<int64_t> column_generations_;
};

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_GRADIENTS_H_
