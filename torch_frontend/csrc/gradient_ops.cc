// SPDX-License-Identifier: Apache-2.0
// The ops weight_gradient, reduce and apply, and the stage weight_gradient_of_rows.
#include <ATen/Functions.h>

#include "apply.h"
#include "context.h"
#include "ops.h"
#include "sok/gradient.h"
#include "stages.h"
#include "status.h"
#include "views.h"

namespace sok_torch {
namespace {

// The parts of gradients as their flat schema arguments spell them: slots, values and combiner for each part; row
// splits, weights and the mark "unique" for the parts that have them.
class Parts {
 public:
  Parts(at::TensorList slots, at::TensorList values, at::IntArrayRef combiners, at::TensorList row_splits,
        at::IntArrayRef bagged, at::TensorList weights, at::IntArrayRef weighted, at::IntArrayRef unique) {
    const size_t n = slots.size();
    TORCH_CHECK_VALUE(values.size() == n && combiners.size() == n,
                      "slots, values and combiners must have one entry a part");
    TORCH_CHECK_VALUE(row_splits.size() == bagged.size() && weights.size() == weighted.size(),
                      "row_splits and bagged, weights and weighted must have equal lengths");
    parts_.reserve(n);
    for (size_t i = 0; i < n; ++i) {
      sok_gradient part = SOK_GRADIENT_INIT;
      part.combiner = static_cast<int32_t>(combiners[i]);
      part.slots = view(slots[i], "slots", &owned_);
      part.values = view_of_rows(values[i], "gradient", &owned_);
      num_entries_ += slots[i].numel();
      parts_.push_back(part);
    }
    for (size_t i = 0; i < bagged.size(); ++i) {
      parts_.at(bagged[i]).row_splits = view(row_splits[i], "row_splits", &owned_);
    }
    for (size_t i = 0; i < weighted.size(); ++i) parts_.at(weighted[i]).weights = view(weights[i], "weights", &owned_);
    for (const int64_t i : unique) parts_.at(i).flags |= SOK_GRADIENT_UNIQUE;
  }

  int32_t size() const { return static_cast<int32_t>(parts_.size()); }
  const sok_gradient* data() const { return parts_.data(); }
  const std::vector<sok_gradient>& all() const { return parts_; }
  int64_t num_entries() const { return num_entries_; }

 private:
  std::vector<at::Tensor> owned_;
  std::vector<sok_gradient> parts_;
  int64_t num_entries_ = 0;
};

// call(context, lookups, views of the output gradients, views of the results) fills in the results.
template <typename Call>
std::vector<at::Tensor> weight_gradient(const OptionalTensors& output_gradients, const LookupArguments& arguments,
                                        Call&& call) {
  Lookups lookups(arguments);
  const OutputGradients gradient_views(output_gradients, lookups);
  const at::TensorList weights = arguments.weights;
  std::vector<sok_tensor> weight_views(lookups.size(), kAbsent);
  std::vector<at::Tensor> results;
  results.reserve(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    results.push_back(at::empty(weights[i].sizes(), weights[i].options().requires_grad(false)));
    weight_views.at(arguments.weighted[i]) = view(results.back(), "weight gradient");
  }
  if (results.empty()) return results;
  const Context context(weights[0].device());
  call(context.get(), lookups, gradient_views.data(), weight_views.data());
  return results;
}

}  // namespace

std::vector<at::Tensor> weight_gradient(const OptionalTensors& output_gradients, at::TensorList tables,
                                        const Names& names, at::IntArrayRef /*owners*/, at::IntArrayRef /*num_rows*/,
                                        at::TensorList keys, at::IntArrayRef key_tables, at::IntArrayRef combiners,
                                        at::TensorList row_splits, at::IntArrayRef bagged, at::TensorList weights,
                                        at::IntArrayRef weighted) {
  const std::vector<sok_columns> columns = make_columns(tables, names);
  return weight_gradient(
      output_gradients, {keys, key_tables, combiners, row_splits, bagged, weights, weighted},
      [&](const sok_context* context, const Lookups& lookups, const sok_tensor* outputs, const sok_tensor* results) {
        SOK_CALL(sok_weight_gradient(context, static_cast<int32_t>(columns.size()), columns.data(), lookups.size(),
                                     lookups.data(), outputs, results));
      });
}

std::vector<at::Tensor> weight_gradient_of_rows(const OptionalTensors& output_gradients, const Placement& placement,
                                                const LookupArguments& arguments, const at::Tensor& inverse,
                                                const at::Tensor& rows) {
  const std::vector<sok_placement> tables = placements_of(placement);
  return weight_gradient(
      output_gradients, arguments,
      [&](const sok_context* context, const Lookups& lookups, const sok_tensor* outputs, const sok_tensor* results) {
        SOK_CALL(sok_weight_gradient_of_rows(context, static_cast<int32_t>(tables.size()), tables.data(),
                                             lookups.size(), lookups.data(), outputs, view(inverse, "inverse"),
                                             view(rows, "rows"), results));
      });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> reduce(std::string name, int64_t num_slots, int64_t dimension,
                                                      at::TensorList slots, at::TensorList values,
                                                      at::IntArrayRef combiners, at::TensorList row_splits,
                                                      at::IntArrayRef bagged, at::TensorList weights,
                                                      at::IntArrayRef weighted, at::IntArrayRef unique) {
  const Parts parts(slots, values, combiners, row_splits, bagged, weights, weighted, unique);
  TORCH_CHECK_VALUE(!slots.empty(), "reduce needs at least one part");
  const at::TensorOptions int64 = slots[0].options().dtype(at::kLong).requires_grad(false);
  at::Tensor out_slots = at::empty({parts.num_entries()}, int64);
  at::Tensor out_values = at::empty({parts.num_entries(), dimension}, int64.dtype(at::kFloat));
  at::Tensor count = at::empty({1}, int64);
  // Of the table, reduce reads the shape alone; any address will do.
  const sok_columns table = {
      sizeof(sok_columns), name.c_str(), {count.data_ptr(), SOK_FLOAT32, 2, {num_slots, dimension}, 0}};
  const Context context(slots[0].device());
  SOK_CALL(sok_reduce(context.get(), &table, parts.size(), parts.data(), view(out_slots, "slots"),
                      view(out_values, "values"), view(count, "count")));
  return {out_slots, out_values, count};
}

void apply_parts(at::TensorList tables, at::TensorList states, const Names& names, at::IntArrayRef num_states,
                 at::IntArrayRef num_parts, const std::vector<sok_gradient>& parts, at::IntArrayRef kinds,
                 at::IntArrayRef flags, at::ArrayRef<double> settings, at::ArrayRef<double> gradient_scales,
                 at::TensorList stamps, at::IntArrayRef stamped, int64_t stamp) {
  constexpr size_t kFields = 13;
  const size_t n = tables.size();
  const size_t m = kinds.size();  // 1: all tables take the same step
  TORCH_CHECK_VALUE(names.size() == n && num_states.size() == n && num_parts.size() == n && (m == 1 || m == n) &&
                        flags.size() == m && settings.size() == kFields * m && gradient_scales.size() == m,
                    "apply needs one name, ... a table, and one kind, ... and ", kFields, " settings for all or each");
  if (n == 0) return;
  std::vector<sok_columns> shards;
  std::vector<sok_optimizer> optimizers;
  std::vector<sok_update> updates;
  shards.reserve(n);
  optimizers.reserve(n);
  updates.reserve(n);
  size_t state = 0;
  int64_t part = 0;
  for (size_t i = 0; i < n; ++i) {
    const std::string& name = names.get(i);
    shards.push_back(make_columns(tables[i], name.c_str()));
    const size_t own = m == 1 ? 0 : i;
    const double* field = settings.data() + kFields * own;
    optimizers.push_back({sizeof(sok_optimizer), static_cast<int32_t>(kinds[own]), static_cast<uint32_t>(flags[own]),
                          field[0], field[1], field[2], field[3], field[4], field[5], field[6], field[7], field[8],
                          field[9], field[10], field[11], field[12]});
    sok_update update = SOK_UPDATE_INIT;
    update.table = &shards.back();
    update.optimizer = &optimizers.back();
    update.gradient_scale = gradient_scales[own];
    TORCH_CHECK_VALUE(num_states[i] >= 0 && num_states[i] <= SOK_MAX_STATES && state + num_states[i] <= states.size(),
                      "table ", name, " has ", num_states[i], " states");
    update.num_states = static_cast<int32_t>(num_states[i]);
    for (int64_t j = 0; j < num_states[i]; ++j) update.states[j] = view(states[state++], "optimizer state");
    TORCH_CHECK_VALUE(num_parts[i] >= 0 && part + num_parts[i] <= static_cast<int64_t>(parts.size()), "table ", name,
                      " has ", num_parts[i], " parts");
    update.num_gradients = static_cast<int32_t>(num_parts[i]);
    update.gradients = parts.data() + part;
    part += num_parts[i];
    updates.push_back(update);
  }
  TORCH_CHECK_VALUE(stamps.size() == stamped.size(), stamps.size(), " stamps for ", stamped.size(), " tables");
  for (size_t i = 0; i < stamps.size(); ++i) {
    sok_update& update = updates.at(stamped[i]);
    update.stamps = view(stamps[i], "stamps");
    update.stamp = stamp;
  }
  const Context context(tables[0].device(), Earlier::kRaised);
  SOK_CALL(sok_apply(context.get(), static_cast<int32_t>(n), updates.data()));
  // Lets autograd notice that what it saved of a table is no longer what it was.
  for (const at::Tensor& table : tables) table.unsafeGetTensorImpl()->bump_version();
  for (const at::Tensor& tensor : states) tensor.unsafeGetTensorImpl()->bump_version();
  for (const at::Tensor& tensor : stamps) tensor.unsafeGetTensorImpl()->bump_version();
}

void apply(at::TensorList tables, at::TensorList states, const Names& names, at::IntArrayRef num_states,
           at::IntArrayRef num_parts, at::TensorList slots, at::TensorList values, at::IntArrayRef combiners,
           at::TensorList row_splits, at::IntArrayRef bagged, at::TensorList weights, at::IntArrayRef weighted,
           at::IntArrayRef unique, at::IntArrayRef kinds, at::IntArrayRef flags, at::ArrayRef<double> settings,
           at::ArrayRef<double> gradient_scales, at::TensorList stamps, at::IntArrayRef stamped, int64_t stamp) {
  const Parts parts(slots, values, combiners, row_splits, bagged, weights, weighted, unique);
  apply_parts(tables, states, names, num_states, num_parts, parts.all(), kinds, flags, settings, gradient_scales,
              stamps, stamped, stamp);
}

}  // namespace sok_torch
