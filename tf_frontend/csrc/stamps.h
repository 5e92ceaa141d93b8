// SPDX-License-Identifier: Apache-2.0
// The stamps of the tables of a step (../stamps.py), as the one resource that SokApply takes.
#ifndef SOK_TENSORFLOW_STAMPS_H_
#define SOK_TENSORFLOW_STAMPS_H_

#include <string>
#include <utility>
#include <vector>

#include "tables.h"
#include "tensorflow/core/framework/resource_base.h"

namespace sok::tf {

class Stamps : public ::tensorflow::ResourceBase {
 public:
  explicit Stamps(std::vector<VarPtr> variables) : variables_(std::move(variables)) {}
  std::string DebugString() const override { return "stamps of tables"; }

  // Adds the variables of tables that are tracked to `locks`, which are found but not locked. Returns their places
  // there, -1 for tables that nobody tracks.
  std::vector<int> AddTo(VariableLocks* locks, size_t num_tables) const;

 private:
  // Int64 variables [slots of the table], or [0] while it is not tracked; of a dynamic table they show a column. Null
  // where one was not made. May be fewer than there are tables.
  std::vector<VarPtr> variables_;
};

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_STAMPS_H_
