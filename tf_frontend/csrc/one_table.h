// SPDX-License-Identifier: Apache-2.0
// Ops on one dynamic table between steps.
#ifndef SOK_TENSORFLOW_ONE_TABLE_H_
#define SOK_TENSORFLOW_ONE_TABLE_H_

#include "tables.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok::tf {

class OneTableOp : public ::tensorflow::OpKernel {
 public:
  // mode: how the table's variable is locked while the op runs. Exclusively: its slots may be others afterwards.
  OneTableOp(OpKernelConstruction* ctx, VariableLocks::Mode mode);
  // Raises first what a GPU has found wrong, and then runs the op.
  void Compute(OpKernelContext* ctx) final;

 protected:
  virtual absl::Status Run(OpKernelContext* ctx, const sok_context* core, sok_dynamic_table* table) = 0;

  const sok_placement& placement() const { return attributes_.tables().front(); }

 private:
  TableAttributes attributes_;
  const VariableLocks::Mode mode_;
};

// Shape functions.
absl::Status NoOutputs(::tensorflow::shape_inference::InferenceContext* c);
// Output `output` is rows of the table: [n, dimension].
absl::Status RowsOfTable(::tensorflow::shape_inference::InferenceContext* c, int output,
                         ::tensorflow::shape_inference::DimensionHandle n);

// Output 0 has an element for each of the vector `keys`.
absl::Status OnePerKey(::tensorflow::shape_inference::InferenceContext* c);

// The single number in host memory that an input is.
absl::Status ReadInteger(OpKernelContext* ctx, const char* input, int64_t* number);

// The slots that the inputs `first_slot` and `num_slots` name of those that there are: n from `first` on.
absl::Status ReadSlots(OpKernelContext* ctx, int64_t there, int64_t* first, int64_t* n);

// The keys and slots that an index holds among `n` slots from `first` on, [count] each where the op runs, ascending by
// slot. On a GPU it waits.
absl::Status HeldSlots(OpKernelContext* ctx, const sok_context* core, const sok_hash_index* index, int64_t first,
                       int64_t n, Tensor* keys, Tensor* slots);

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_ONE_TABLE_H_
