// SPDX-License-Identifier: Apache-2.0
// Evaluation: lookups of tables with an index that insert nothing.
#ifndef SOK_TENSORFLOW_READ_BY_KEY_H_
#define SOK_TENSORFLOW_READ_BY_KEY_H_

#include <mutex>
#include <vector>

#include "tables.h"

// An attribute of ops that read rows of tables, and its text.
#define SOK_BY_KEY_ATTRIBUTE Attr("by_key: bool = false")
#define SOK_BY_KEY_ATTRIBUTE_DOC                                                                                      \
  "by_key: whether the keys of tables with an index are keys, of which those that a table lacks have their initial\n" \
  "  rows; else they are slots.\n"

namespace sok::tf {

// 0, 1, 2, ... where the op runs, which a kernel keeps from call to call: making them waits for a GPU.
class Numbers {
 public:
  // The first n of them.
  absl::Status Take(OpKernelContext* ctx, int64_t n, Tensor* numbers);

 private:
  std::mutex mutex_;
  Tensor kept_ = Tensor(::tensorflow::DT_INT64);
};

// The rows that lookups of tables with an index name by key; keys that a table lacks have their initial ones. Lives as
// long as the lookups.
class RowsByKey {
 public:
  // The keys of each lookup of a table with an index are in its slots, or its keys where it has none. On the CPU the
  // stages find them. On a GPU the rows are read into temporary memory: the lookup's table becomes a further one of
  // `columns`, its rows, and its slots are their numbers.
  //   locks  hold the variables of `tables`, shared
  absl::Status Read(OpKernelContext* ctx, const sok_context* core, const TableAttributes& tables, Numbers* numbers,
                    VariableLocks* locks, std::vector<sok_columns>* columns, std::vector<sok_lookup>* lookups);

 private:
  std::vector<Tensor> rows_;
  Tensor numbers_;
};

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_READ_BY_KEY_H_
