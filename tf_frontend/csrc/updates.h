// SPDX-License-Identifier: Apache-2.0
// The updates of an optimizer's step, as inputs of an op: tables, states, stamps, numbers of the optimizer, gradients.
#ifndef SOK_TENSORFLOW_UPDATES_H_
#define SOK_TENSORFLOW_UPDATES_H_

#include <vector>

#include "gradients.h"
#include "tables.h"

#define SOK_UPDATE_INPUTS                     \
  Input("tables: num_tables * resource")      \
      .Input("states: num_states * resource") \
      .Input("stamps: resource")              \
      .Input("hyperparameters: float64")      \
      .Input("gradient_scale: float64")       \
      .SOK_GRADIENT_INPUTS

#define SOK_UPDATE_ATTRIBUTES                                               \
  SOK_TABLE_ATTRIBUTES.SOK_GRADIENT_ATTRIBUTES.Attr("num_states: int >= 0") \
      .Attr("kind: int")                                                    \
      .Attr("flags: list(int) >= 1")

#define SOK_UPDATE_DOC                                                                                                 \
  "tables: float32, float16 or bfloat16 variables, this rank's rows of each table.\n"                                  \
  "states: the states of table 0, then those of table 1, ...; of the table's shape, or [rows].\n"                      \
  "stamps: what SokStamps gave for the tables.\n"                                                                      \
  "hyperparameters: [1 or num_tables, 13] number members of sok_optimizer in its order, for all tables or each.\n"     \
  "gradient_scale: what gradients are multiplied with: [], or [num_tables], for each table.\n" SOK_GRADIENT_INPUTS_DOC \
      SOK_TABLE_ATTRIBUTES_DOC SOK_GRADIENT_ATTRIBUTES_DOC                                                             \
  "kind: sok_optimizer_kind.\nflags: of sok_optimizer, for each table.\n"

#define SOK_REGISTER_UPDATE_KERNELS(NAME, CLASS, ...)      \
  SOK_REGISTER_KERNELS(NAME, CLASS,                        \
                       .HostMemory("hyperparameters")      \
                           .HostMemory("gradient_scale")   \
                           .HostMemory("exchanged_counts") \
                           .HostMemory("generations") __VA_ARGS__)

namespace sok::tf {

// Whether the inputs have the shapes of updates.
absl::Status CheckUpdateShapes(::tensorflow::shape_inference::InferenceContext* c);

// A kernel of an op with these inputs and attributes.
class UpdateKernel : public ::tensorflow::OpKernel {
 public:
  explicit UpdateKernel(OpKernelConstruction* ctx);

 protected:
  // sok_apply of the inputs, which holds the locks of the variables in this mode.
  absl::Status Apply(OpKernelContext* ctx, VariableLocks::Mode mode, sok_agree agree, void* opaque) const;

  int num_ranks() const { return tables_.num_ranks(); }
  int rank() const { return tables_.rank(); }

 private:
  TableAttributes tables_;
  GradientAttributes gradients_;
  int num_states_;
  int kind_;
  std::vector<int64_t> flags_;
};

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_UPDATES_H_
