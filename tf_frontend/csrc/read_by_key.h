// SPDX-License-Identifier: Apache-2.0
// Evaluation: lookups of dynamic tables that insert nothing.
#ifndef SOK_TENSORFLOW_READ_BY_KEY_H_
#define SOK_TENSORFLOW_READ_BY_KEY_H_

#include <vector>

#include "tables.h"

// An attribute of ops that read rows of tables, and its text.
#define SOK_BY_KEY_ATTRIBUTE Attr("by_key: bool = false")
#define SOK_BY_KEY_ATTRIBUTE_DOC                                                                                     \
  "by_key: whether the keys of dynamic tables are keys, of which those that a table lacks have their initial rows; " \
  "else\n  they are slots.\n"

namespace sok::tf {

// The rows that lookups of dynamic tables name by key, in temporary memory; keys that a table lacks have their initial
// ones. Lives as long as the lookups.
class RowsByKey {
 public:
  // Reads the rows of each lookup of a dynamic table, whose keys are in its slots, or its keys where it has none. The
  // lookup's table becomes a further one of `columns`, its rows, and its slots are their numbers.
  //   locks  hold the variables of `tables`, shared
  absl::Status Read(OpKernelContext* ctx, const sok_context* core, const std::vector<sok_placement>& tables,
                    VariableLocks* locks, std::vector<sok_columns>* columns, std::vector<sok_lookup>* lookups);

 private:
  absl::Status MakeNumbers(OpKernelContext* ctx, int64_t n);

  std::vector<Tensor> rows_;
  Tensor numbers_;  // 0, 1, 2, ...
};

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_READ_BY_KEY_H_
