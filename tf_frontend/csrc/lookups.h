// SPDX-License-Identifier: Apache-2.0
// Lookups of an op: keys, row splits and weights of each (table, batch) pair of a call.
#ifndef SOK_TENSORFLOW_LOOKUPS_H_
#define SOK_TENSORFLOW_LOOKUPS_H_

#include <algorithm>
#include <string>
#include <vector>

#include "support.h"
#include "tables.h"

// Inputs and attributes of each op that takes lookups.
#define SOK_LOOKUP_INPUTS \
  Input("keys: key_types").Input("row_splits: num_lookups * int64").Input("weights: num_weighted * float32")

#define SOK_LOOKUP_ATTRIBUTES                  \
  Attr("key_types: list({int32, int64}) >= 1") \
      .Attr("num_lookups: int >= 1")           \
      .Attr("num_weighted: int >= 0")          \
      .Attr("lookup_tables: list(int) >= 1")   \
      .Attr("combiners: list(int) >= 1")       \
      .Attr("weighted: list(bool) >= 1")       \
      .Attr("members: list(int) = []")         \
      .Attr("member_names: list(string) = []") \
      .Attr("member_keys: list(int) = []")     \
      .Attr("member_rows: list(int) = []")

// What the ops give that pool bags, and the gradient of it, which others take.
#define SOK_POOLED_OUTPUTS Output("outputs: num_outputs * float32").Attr("num_outputs: int >= 1")
#define SOK_POOLED_GRADIENTS Input("output_gradients: num_outputs * float32").Attr("num_outputs: int >= 1")

#define SOK_POOLED_OUTPUTS_DOC                                                                                      \
  "outputs: [bags, dimension] for each lookup, or [bags / members, members * dimension] of one that has members;\n" \
  "  zeros for an empty bag.\n"                                                                                     \
  "num_outputs: as many as lookups; or 1: they are columns of one array, [bags, sum of dimensions], those of\n"     \
  "  lookup i right of those of lookup i - 1, and all lookups must have as many bags.\n"

#define SOK_POOLED_GRADIENTS_DOC \
  "output_gradients: like the outputs of the lookups, or one array of which they are columns.\n"

#define SOK_LOOKUP_INPUTS_DOC                                                            \
  "keys: [n] for each lookup.\n"                                                         \
  "row_splits: [bags + 1] for each lookup, or [0] where each key is a bag of its own.\n" \
  "weights: [n] for each lookup that `weighted` marks.\n"

#define SOK_LOOKUP_ATTRIBUTES_DOC                                                                                   \
  "lookup_tables: position of each lookup's table.\n"                                                               \
  "combiners: sok_combiner of each lookup: 0 sum, 1 mean, 2 sqrtn.\n"                                               \
  "weighted: whether each lookup has weights.\n"                                                                    \
  "members: how many members of a stack each lookup has, 0 where its table is none; [] where none is a stack.\n"    \
  "member_names, member_keys, member_rows: of all of these in turn, the name, the first key in the stack and the\n" \
  "  number of rows; not read where keys are slots.\n"

namespace sok::tf {

// The attribute `lookup_tables`, whose positions must be in [0, num_tables).
std::vector<int64_t> LookupTables(OpKernelConstruction* ctx, int num_tables);

class LookupAttributes {
 public:
  LookupAttributes(OpKernelConstruction* ctx, int num_tables);
  LookupAttributes(const LookupAttributes&) = delete;
  LookupAttributes& operator=(const LookupAttributes&) = delete;
  int num_lookups() const { return static_cast<int>(tables_.size()); }
  const std::vector<int64_t>& tables() const { return tables_; }
  bool weighted(int lookup) const { return weighted_[lookup]; }

  // The sok_lookup of each lookup, from the op's inputs; checks ranks and that weights are as many as keys.
  absl::Status Read(OpKernelContext* ctx, const std::vector<sok_placement>& tables,
                    std::vector<sok_lookup>* lookups) const;

  static int64_t NumBags(const sok_lookup& lookup);
  // The bags of each member, or of the table: the rows of the lookup's output; and the columns.
  static int64_t NumRows(const sok_lookup& lookup) { return NumBags(lookup) / std::max(1, lookup.num_members); }
  static int64_t NumColumns(const sok_lookup& lookup, const std::vector<sok_placement>& tables) {
    return tables[lookup.table].dimension * std::max(1, lookup.num_members);
  }

 private:
  std::vector<int64_t> tables_;
  std::vector<int64_t> combiners_;
  std::vector<bool> weighted_;
  std::vector<int64_t> num_members_;  // of each lookup
  std::vector<std::string> member_names_;
  std::vector<sok_member> members_;  // of all lookups in turn
};

// Fails unless all lookups have as many bags.
absl::Status CheckBagsAreAsMany(const std::vector<sok_placement>& tables, const std::vector<sok_lookup>& lookups);

// Columns [first, first + width) of a matrix of float32.
sok_tensor Columns(const Tensor& matrix, int64_t first, int64_t width);

// Allocates the output list `outputs`, one for each lookup or one for all, and points lookups[i].output at its part.
absl::Status AllocateOutputs(OpKernelContext* ctx, const std::vector<sok_placement>& tables,
                             std::vector<sok_lookup>* lookups);

// Views of the input list `output_gradients` for each lookup, checked against the lookups.
absl::Status ReadOutputGradients(OpKernelContext* ctx, const std::vector<sok_placement>& tables,
                                 const std::vector<sok_lookup>& lookups, std::vector<sok_tensor>* gradients);

// Shape function of SOK_POOLED_OUTPUTS.
absl::Status LookupOutputShapes(::tensorflow::shape_inference::InferenceContext* c);

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_LOOKUPS_H_
