// SPDX-License-Identifier: Apache-2.0
#include "lookups.h"

namespace sok::tf {
namespace {

using ::tensorflow::OpInputList;

std::string Where(size_t lookup, const sok_placement& table) {
  return absl::StrCat("lookup ", lookup, " (table '", table.name, "'): ");
}

// Whether this many arrays are one for all lookups.
bool AreSideBySide(int count, const std::vector<sok_lookup>& lookups) { return count == 1 && lookups.size() > 1; }

int64_t TotalDimension(const std::vector<sok_placement>& tables, const std::vector<sok_lookup>& lookups) {
  int64_t total = 0;
  for (const sok_lookup& lookup : lookups) total += LookupAttributes::NumColumns(lookup, tables);
  return total;
}

}  // namespace

std::vector<int64_t> LookupTables(OpKernelConstruction* ctx, int num_tables) {
  std::vector<int64_t> tables = Attribute<std::vector<int64_t>>(ctx, "lookup_tables");
  for (const int64_t table : tables) {
    if (table < 0 || table >= num_tables) {
      ctx->CtxFailure(errors::InvalidArgument("lookup_tables names table ", table, " of ", num_tables));
    }
  }
  return tables;
}

LookupAttributes::LookupAttributes(OpKernelConstruction* ctx, int num_tables)
    : tables_(LookupTables(ctx, num_tables)),
      combiners_(Attribute<std::vector<int64_t>>(ctx, "combiners")),
      weighted_(Attribute<std::vector<bool>>(ctx, "weighted")),
      num_members_(Attribute<std::vector<int64_t>>(ctx, "members")),
      member_names_(Attribute<std::vector<std::string>>(ctx, "member_names")) {
  const size_t count = Attribute<int>(ctx, "num_lookups");
  size_t num_weighted = 0;
  for (const bool is_weighted : weighted_) num_weighted += is_weighted;
  OP_REQUIRES(ctx,
              tables_.size() == count && combiners_.size() == count && weighted_.size() == count &&
                  num_weighted == static_cast<size_t>(Attribute<int>(ctx, "num_weighted")) &&
                  Attribute<std::vector<::tensorflow::DataType>>(ctx, "key_types").size() == count,
              errors::InvalidArgument("the attributes of the lookups do not fit together"));
  const auto keys = Attribute<std::vector<int64_t>>(ctx, "member_keys");
  const auto rows = Attribute<std::vector<int64_t>>(ctx, "member_rows");
  if (num_members_.empty()) num_members_.assign(count, 0);
  int64_t total = 0;
  for (const int64_t members : num_members_) {
    OP_REQUIRES(ctx, members >= 0 && members <= INT32_MAX,
                errors::InvalidArgument("a lookup has ", members, " members"));
    total += members;
  }
  const auto num_members = static_cast<size_t>(total);
  OP_REQUIRES(ctx,
              num_members_.size() == count && member_names_.size() == num_members && keys.size() == num_members &&
                  rows.size() == num_members,
              errors::InvalidArgument("the attributes of the members do not fit together"));
  for (size_t i = 0; i < num_members; ++i) members_.push_back({member_names_[i].c_str(), keys[i], rows[i]});
}

absl::Status LookupAttributes::Read(OpKernelContext* ctx, const std::vector<sok_placement>& tables,
                                    std::vector<sok_lookup>* lookups) const {
  OpInputList keys, row_splits, weights;
  TF_RETURN_IF_ERROR(ctx->input_list("keys", &keys));
  TF_RETURN_IF_ERROR(ctx->input_list("row_splits", &row_splits));
  TF_RETURN_IF_ERROR(ctx->input_list("weights", &weights));
  lookups->clear();
  int next_weights = 0;
  int64_t next_member = 0;
  for (int i = 0; i < num_lookups(); ++i) {
    const sok_placement& table = tables[tables_[i]];
    sok_lookup lookup = SOK_LOOKUP_INIT;
    lookup.table = static_cast<int32_t>(tables_[i]);
    lookup.combiner = static_cast<int32_t>(combiners_[i]);
    if (keys[i].dims() != 1 || row_splits[i].dims() != 1) {
      return errors::InvalidArgument(Where(i, table), "keys and row splits must be vectors, not of shape ",
                                     keys[i].shape().DebugString(), " and ", row_splits[i].shape().DebugString());
    }
    lookup.keys = View(keys[i]);
    if (row_splits[i].NumElements() > 0) lookup.row_splits = View(row_splits[i]);
    if (num_members_[i] > 0) {
      lookup.num_members = static_cast<int32_t>(num_members_[i]);
      lookup.members = members_.data() + next_member;
      next_member += num_members_[i];
      if (NumBags(lookup) % num_members_[i] != 0) {
        return errors::InvalidArgument(Where(i, table), "there are ", NumBags(lookup), " bags, and the stack has ",
                                       num_members_[i], " tables: flat ids have as many bags for each of them");
      }
    }
    if (weighted_[i]) {
      const Tensor& w = weights[next_weights++];
      if (w.dims() != 1 || w.NumElements() != keys[i].NumElements()) {
        return errors::InvalidArgument(Where(i, table), "there are ", keys[i].NumElements(),
                                       " ids, but the weights have the ", "shape ", w.shape().DebugString());
      }
      lookup.weights = View(w);
    }
    lookups->push_back(lookup);
  }
  return absl::OkStatus();
}

int64_t LookupAttributes::NumBags(const sok_lookup& lookup) {
  return lookup.row_splits.rank == 0 ? lookup.keys.shape[0] : lookup.row_splits.shape[0] - 1;
}

absl::Status CheckBagsAreAsMany(const std::vector<sok_placement>& tables, const std::vector<sok_lookup>& lookups) {
  const int64_t bags = LookupAttributes::NumRows(lookups.front());
  for (size_t i = 1; i < lookups.size(); ++i) {
    if (LookupAttributes::NumRows(lookups[i]) == bags) continue;
    return errors::InvalidArgument(Where(i, tables[lookups[i].table]),
                                   "concat=True puts vectors of as many bags side by side, but lookup ", i, " has ",
                                   LookupAttributes::NumRows(lookups[i]), " and lookup 0 has ", bags);
  }
  return absl::OkStatus();
}

sok_tensor Columns(const Tensor& matrix, int64_t first, int64_t width) {
  sok_tensor columns = View(matrix);
  if (columns.data != nullptr) columns.data = static_cast<float*>(columns.data) + first;
  columns.shape[1] = width;
  columns.row_stride = matrix.dim_size(1);
  return columns;
}

absl::Status AllocateOutputs(OpKernelContext* ctx, const std::vector<sok_placement>& tables,
                             std::vector<sok_lookup>* lookups) {
  ::tensorflow::OpOutputList outputs;
  TF_RETURN_IF_ERROR(ctx->output_list("outputs", &outputs));
  Tensor* output = nullptr;
  if (!AreSideBySide(outputs.size(), *lookups)) {
    for (size_t i = 0; i < lookups->size(); ++i) {
      sok_lookup& lookup = (*lookups)[i];
      TF_RETURN_IF_ERROR(
          outputs.allocate(static_cast<int>(i),
                           {LookupAttributes::NumRows(lookup), LookupAttributes::NumColumns(lookup, tables)}, &output));
      lookup.output = View(*output);
    }
    return absl::OkStatus();
  }
  TF_RETURN_IF_ERROR(CheckBagsAreAsMany(tables, *lookups));
  TF_RETURN_IF_ERROR(
      outputs.allocate(0, {LookupAttributes::NumRows(lookups->front()), TotalDimension(tables, *lookups)}, &output));
  int64_t first = 0;
  for (sok_lookup& lookup : *lookups) {
    const int64_t columns = LookupAttributes::NumColumns(lookup, tables);
    lookup.output = Columns(*output, first, columns);
    first += columns;
  }
  return absl::OkStatus();
}

absl::Status ReadOutputGradients(OpKernelContext* ctx, const std::vector<sok_placement>& tables,
                                 const std::vector<sok_lookup>& lookups, std::vector<sok_tensor>* gradients) {
  OpInputList inputs;
  TF_RETURN_IF_ERROR(ctx->input_list("output_gradients", &inputs));
  const bool side_by_side = AreSideBySide(inputs.size(), lookups);
  const int64_t total = TotalDimension(tables, lookups);
  int64_t first = 0;
  for (size_t i = 0; i < lookups.size(); ++i) {
    const sok_placement& table = tables[lookups[i].table];
    const Tensor& gradient = inputs[side_by_side ? 0 : static_cast<int>(i)];
    const int64_t bags = LookupAttributes::NumRows(lookups[i]), own = LookupAttributes::NumColumns(lookups[i], tables);
    const int64_t columns = side_by_side ? total : own;
    if (gradient.dims() != 2 || gradient.dim_size(0) != bags || gradient.dim_size(1) != columns) {
      return errors::InvalidArgument(Where(i, table), "the gradient of the output has the shape ",
                                     gradient.shape().DebugString(), ", not [", bags, ", ", columns, "]");
    }
    gradients->push_back(side_by_side ? Columns(gradient, first, own) : View(gradient));
    first += own;
  }
  return absl::OkStatus();
}

absl::Status LookupOutputShapes(::tensorflow::shape_inference::InferenceContext* c) {
  std::vector<int64_t> dimensions, tables, members;
  TF_RETURN_IF_ERROR(c->GetAttr("dimensions", &dimensions));
  TF_RETURN_IF_ERROR(c->GetAttr("members", &members));
  TF_RETURN_IF_ERROR(c->GetAttr("lookup_tables", &tables));
  std::vector<::tensorflow::shape_inference::ShapeHandle> keys, row_splits, outputs;
  TF_RETURN_IF_ERROR(c->input("keys", &keys));
  TF_RETURN_IF_ERROR(c->input("row_splits", &row_splits));
  if (keys.size() != tables.size() || row_splits.size() != tables.size()) {
    return errors::InvalidArgument("keys, row_splits and lookup_tables must be equally long");
  }
  for (size_t i = 0; i < tables.size(); ++i) {
    if (tables[i] < 0 || tables[i] >= static_cast<int64_t>(dimensions.size())) {
      return errors::InvalidArgument("lookup_tables names table ", tables[i], " of ", dimensions.size());
    }
    TF_RETURN_IF_ERROR(c->WithRank(keys[i], 1, &keys[i]));
    TF_RETURN_IF_ERROR(c->WithRank(row_splits[i], 1, &row_splits[i]));
    auto bags = c->UnknownDim();
    const auto splits = c->Dim(row_splits[i], 0);
    if (c->ValueKnown(splits)) {
      if (c->Value(splits) == 0) {
        bags = c->Dim(keys[i], 0);
      } else {
        TF_RETURN_IF_ERROR(c->Subtract(splits, 1, &bags));
      }
    }
    const int64_t of_stack = i < members.size() ? std::max<int64_t>(1, members[i]) : 1;
    TF_RETURN_IF_ERROR(c->Divide(bags, of_stack, /*evenly_divisible=*/true, &bags));
    outputs.push_back(c->Matrix(bags, c->MakeDim(dimensions[tables[i]] * of_stack)));
  }
  int64_t num_outputs = 0;
  TF_RETURN_IF_ERROR(c->GetAttr("num_outputs", &num_outputs));
  if (num_outputs == static_cast<int64_t>(outputs.size())) return c->set_output("outputs", outputs);
  if (num_outputs != 1) {
    return errors::InvalidArgument("num_outputs must be 1 or ", outputs.size(), ", not ", num_outputs);
  }
  auto bags = c->Dim(outputs[0], 0), total = c->MakeDim(0);
  for (const auto& output : outputs) {
    TF_RETURN_IF_ERROR(c->Merge(bags, c->Dim(output, 0), &bags));
    TF_RETURN_IF_ERROR(c->Add(total, c->Dim(output, 1), &total));
  }
  return c->set_output("outputs", {c->Matrix(bags, total)});
}

}  // namespace sok::tf
