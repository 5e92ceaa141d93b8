// SPDX-License-Identifier: Apache-2.0
#include "tables.h"

#include <algorithm>
#include <utility>

#include "gpu.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace sok::tf {
namespace {

// Makes the buffer of an exclusively locked variable its own, for good: see VariableLocks.
absl::Status OwnBuffer(OpKernelContext* ctx, Var* variable) {
  if (variable->copy_on_read_mode.load()) return absl::OkStatus();
  Tensor* tensor = variable->tensor();
  if (!tensor->RefCountIsOne()) {
    Tensor copy;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
    TF_RETURN_IF_ERROR(CopyOnDevice(ctx, *tensor, &copy));
    *tensor = copy;
  }
  variable->copy_on_read_mode.store(true);
  return absl::OkStatus();
}

}  // namespace

TableAttributes::TableAttributes(OpKernelConstruction* ctx) {
  names_ = Attribute<std::vector<std::string>>(ctx, "table_names");
  dimensions_ = Attribute<std::vector<int64_t>>(ctx, "dimensions");
  num_ranks_ = Attribute<int>(ctx, "num_ranks");
  rank_ = Attribute<int>(ctx, "rank");
  const auto num_rows = Attribute<std::vector<int64_t>>(ctx, "num_rows");
  const auto owners = Attribute<std::vector<int64_t>>(ctx, "owners");
  const size_t count = Attribute<int>(ctx, "num_tables");
  OP_REQUIRES(
      ctx, names_.size() == count && dimensions_.size() == count && num_rows.size() == count && owners.size() == count,
      errors::InvalidArgument("table_names, dimensions, num_rows and owners need num_tables entries each"));
  for (size_t i = 0; i < count; ++i) {
    sok_placement table = SOK_PLACEMENT_INIT;
    table.name = names_[i].c_str();
    table.owner = static_cast<int32_t>(owners[i]);
    table.num_ranks = num_ranks_;
    table.rank = rank_;
    table.num_rows = num_rows[i];
    table.dimension = dimensions_[i];
    tables_.push_back(table);
  }
  place_.assign(count, -1);
  for (const int64_t table : Attribute<std::vector<int64_t>>(ctx, "indexed")) {
    OP_REQUIRES(ctx, table >= 0 && table < static_cast<int64_t>(count) && place_[table] < 0,
                errors::InvalidArgument("indexed must be positions of tables, ascending"));
    place_[table] = num_indexed_++;
  }
}

absl::Status VariableLocks::Lock(OpKernelContext* ctx, const std::vector<const char*>& inputs, Mode mode) {
  TF_RETURN_IF_ERROR(Find(ctx, inputs));
  return LockFound(ctx, mode);
}

absl::Status VariableLocks::Find(OpKernelContext* ctx, const std::vector<const char*>& inputs) {
  for (const char* name : inputs) {
    ::tensorflow::OpInputList handles;
    TF_RETURN_IF_ERROR(ctx->input_list(name, &handles));
    for (int i = 0; i < handles.size(); ++i) {
      const auto& handle = handles[i].flat<::tensorflow::ResourceHandle>()(0);
      VarPtr variable;
      const absl::Status found = LookupResource(ctx, handle, &variable);
      if (absl::IsNotFound(found)) {
        return errors::FailedPrecondition("variable '", handle.name(), "' is not initialized, or was deleted");
      }
      TF_RETURN_IF_ERROR(found);
      Add(std::move(variable), handle.name());
    }
  }
  return absl::OkStatus();
}

void VariableLocks::Add(VarPtr variable, std::string name) {
  variables_.push_back(std::move(variable));
  names_.push_back(std::move(name));
}

absl::Status VariableLocks::LockFound(OpKernelContext* ctx, Mode mode) {
  std::vector<::tensorflow::mutex*> mutexes;
  for (auto& variable : variables_) mutexes.push_back(variable->mu());
  std::sort(mutexes.begin(), mutexes.end());
  mutexes.erase(std::unique(mutexes.begin(), mutexes.end()), mutexes.end());
  mode_ = mode;
  for (auto* mutex : mutexes) {
    if (mode == kShared) {
      mutex->lock_shared();
    } else {
      mutex->lock();
    }
    locked_.push_back(mutex);
  }
  for (size_t i = 0; i < variables_.size(); ++i) {
    if (!variables_[i]->tensor()->IsInitialized()) {
      return errors::FailedPrecondition("variable '", names_[i], "' is not initialized");
    }
    if (mode == kExclusive) TF_RETURN_IF_ERROR(OwnBuffer(ctx, variables_[i].get()));
  }
  return absl::OkStatus();
}

VariableLocks::~VariableLocks() {
  for (auto it = locked_.rbegin(); it != locked_.rend(); ++it) {
    if (mode_ == kShared) {
      (*it)->unlock_shared();
    } else {
      (*it)->unlock();
    }
  }
}

absl::Status ReadColumns(VariableLocks* locks, const TableAttributes& tables, std::vector<sok_columns>* columns) {
  if (locks->size() < tables.num_tables()) {
    return errors::InvalidArgument(tables.num_tables(), " tables but ", locks->size(), " variables");
  }
  for (int i = 0; i < tables.num_tables(); ++i) {
    const sok_placement& table = tables.tables()[i];
    const Tensor& weight = *locks->tensor(i);
    if (tables.is_indexed(i)) {
      IndexedTable* indexed = nullptr;
      TF_RETURN_IF_ERROR(FindIndexed(table, weight, &indexed));
      columns->push_back(indexed->columns(table.name));
      continue;
    }
    const int64_t rows = sok_placement_local_rows(table.num_rows, table.owner, table.num_ranks, table.rank);
    if (weight.dtype() != ::tensorflow::DT_FLOAT && weight.dtype() != ::tensorflow::DT_HALF &&
        weight.dtype() != ::tensorflow::DT_BFLOAT16) {
      return errors::InvalidArgument("table '", table.name, "' must be float32, float16 or bfloat16, not ",
                                     ::tensorflow::DataTypeString(weight.dtype()));
    }
    if (weight.dims() != 2 || weight.dim_size(0) != rows || weight.dim_size(1) != table.dimension) {
      return errors::InvalidArgument("the variable of table '", table.name, "' has the shape ",
                                     weight.shape().DebugString(), ", not [", rows, ", ", table.dimension, "]");
    }
    sok_columns held = SOK_COLUMNS_INIT;
    held.name = table.name;
    held.weight = View(weight);
    columns->push_back(held);
  }
  return absl::OkStatus();
}

absl::Status FindIndexed(const sok_placement& table, const Tensor& weight, IndexedTable** indexed) {
  const ColumnBuffer* const buffer = ColumnBuffer::Of(weight);
  if (buffer == nullptr || buffer->column() != 0 || buffer->view().shape[1] != table.dimension) {
    return errors::FailedPrecondition("the variable of table '", table.name, "' holds no table of dimension ",
                                      table.dimension, " with an index: something was written over it");
  }
  *indexed = buffer->table().get();
  return absl::OkStatus();
}

}  // namespace sok::tf
