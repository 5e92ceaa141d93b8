// SPDX-License-Identifier: Apache-2.0
// Checks of sok_update: what states an optimizer has, and that no two tables of a call share memory; its constants.
#include <algorithm>
#include <vector>

#include "common/call.h"
#include "common/status.h"
#include "common/tensor.h"

namespace sok {
namespace {

struct Kind {
  const char* name;
  int32_t min_states, max_states;
  uint32_t flags;
};

Kind kind_of(const sok_optimizer& optimizer) {
  constexpr uint32_t kDecay = SOK_DECOUPLED_WEIGHT_DECAY;
  const int32_t centered = (optimizer.flags & SOK_CENTERED) != 0 ? 1 : 0;
  switch (optimizer.kind) {
    case SOK_SGD:
      return {"SGD", 0, 0, kDecay};
    case SOK_MOMENTUM:
      return {"momentum", 1, 1, kDecay | SOK_NESTEROV | SOK_LEARNING_RATE_IN_MOMENTUM};
    case SOK_ADAGRAD:
      return {"Adagrad", 1, 1, kDecay | SOK_EPSILON_INSIDE};
    case SOK_ROWWISE_ADAGRAD:
      return {"row-wise Adagrad", 1, 1, kDecay | SOK_EPSILON_INSIDE};
    case SOK_ADAM:
      return {"Adam", 2, 2, kDecay};
    case SOK_ADAMAX:
      return {"Adamax", 2, 2, kDecay | SOK_EPSILON_INSIDE};
    case SOK_ADADELTA:
      return {"Adadelta", 2, 2, kDecay};
    case SOK_RMSPROP:  // a momentum state is used when it is there, and must be when momentum is not 0
      return {"RMSprop", 1 + centered + (optimizer.momentum != 0.0 ? 1 : 0), 2 + centered,
              kDecay | SOK_EPSILON_INSIDE | SOK_CENTERED | SOK_LEARNING_RATE_IN_MOMENTUM};
    case SOK_FTRL:
      return {"Ftrl", 2, 2, kDecay};
    default:
      fail(SOK_INVALID_ARGUMENT, "optimizer.kind is ", optimizer.kind, ", which is none of sok_optimizer_kind");
  }
}

struct Interval {
  uintptr_t begin, end;
  const char* name;
  const char* what;
};

void add_interval(std::vector<Interval>& intervals, const void* data, int64_t bytes, const char* name,
                  const char* what) {
  if (bytes == 0) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  intervals.push_back({begin, begin + static_cast<uintptr_t>(bytes), name, what});
}

}  // namespace

std::vector<Update> check_updates(const sok_context& context, int32_t num_updates, const sok_update* updates) {
  SOK_CHECK(num_updates >= 0, "num_updates is ", num_updates, ", must not be negative");
  SOK_CHECK(num_updates == 0 || updates != nullptr, "updates is NULL");
  static constexpr const char* kStateNames[SOK_MAX_STATES] = {"states[0]", "states[1]", "states[2]"};
  std::vector<Update> result(static_cast<size_t>(num_updates));
  std::vector<Interval> intervals;
  for (int32_t i = 0; i < num_updates; ++i) {
    const sok_update& from = updates[i];
    SOK_CHECK(from.struct_size == sizeof(sok_update), "updates[", i, "].struct_size is ", from.struct_size,
              ", must be ", sizeof(sok_update),
              ": the caller was compiled for another version of the library, or did not initialise the struct");
    Update& to = result[static_cast<size_t>(i)];
    to.table = check_columns(context, from.table, i);
    const Columns& table = to.table;
    SOK_CHECK(from.optimizer != nullptr, "table '", table.name, "': optimizer is NULL");
    SOK_CHECK(from.optimizer->struct_size == sizeof(sok_optimizer), "table '", table.name,
              "': optimizer.struct_size is ", from.optimizer->struct_size, ", must be ", sizeof(sok_optimizer));
    to.optimizer = *from.optimizer;
    to.gradient_scale = from.gradient_scale;
    const Kind kind = kind_of(to.optimizer);
    SOK_CHECK((to.optimizer.flags & ~kind.flags) == 0, "table '", table.name, "': optimizer.flags ", to.optimizer.flags,
              " has bits that ", kind.name, " does not know");
    SOK_CHECK(to.optimizer.kind != SOK_FTRL || to.optimizer.learning_rate_power <= 0, "table '", table.name,
              "': learning_rate_power is ", to.optimizer.learning_rate_power, ", must be 0 or less");
    // Ftrl divides by it, and rows would become NaN.
    SOK_CHECK(to.optimizer.kind != SOK_FTRL || static_cast<float>(to.optimizer.learning_rate) > 0, "table '",
              table.name, "': learning_rate is ", to.optimizer.learning_rate, ", must be more than 0 for Ftrl");
    SOK_CHECK(from.num_states >= kind.min_states && from.num_states <= kind.max_states, "table '", table.name,
              "': ", from.num_states, " states given, ", kind.name, " has ", kind.min_states);
    to.num_states = from.num_states;
    const int64_t elements = table.num_slots * table.dimension;
    add_interval(intervals, table.weight.data, elements * table.weight.item_size(), table.name, "weight");
    for (int32_t s = 0; s < to.num_states; ++s) {
      const Label label{"states", s, nullptr, table.name};
      const bool rowwise = to.optimizer.kind == SOK_ROWWISE_ADAGRAD;
      if (rowwise) {
        check_tensor(from.states[s], label, {SOK_FLOAT32}, {table.num_slots});
      } else {
        check_tensor(from.states[s], label, {SOK_FLOAT32}, {table.num_slots, table.dimension});
      }
      to.states[s] = static_cast<float*>(from.states[s].data);
      add_interval(intervals, to.states[s], (rowwise ? table.num_slots : elements) * int64_t{sizeof(float)}, table.name,
                   kStateNames[s]);
    }
    to.gradients = check_gradients(table, from.num_gradients, from.gradients);
    if (!is_absent(from.stamps)) {
      to.stamps = checked_data<int64_t>(from.stamps, {"stamps", -1, nullptr, table.name}, SOK_INT64, {table.num_slots});
      to.stamp = from.stamp;
      add_interval(intervals, to.stamps, table.num_slots * int64_t{sizeof(*to.stamps)}, table.name, "stamps");
    }
  }
  std::sort(intervals.begin(), intervals.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < intervals.size(); ++i) {
    const Interval &a = intervals[i - 1], &b = intervals[i];
    SOK_CHECK(a.end <= b.begin, "table '", a.name, "' (", a.what, ") and table '", b.name, "' (", b.what,
              ") share memory: a table may occur once in a call");
  }
  return result;
}

OptimizerConstants make_constants(const Update& update) {
  const sok_optimizer& from = update.optimizer;
  const bool decoupled = (from.flags & SOK_DECOUPLED_WEIGHT_DECAY) != 0;
  const auto round = [](double value) { return static_cast<float>(value); };
  OptimizerConstants to = {};
  to.kind = from.kind;
  to.flags = from.flags;
  to.has_momentum = update.num_states == 2 + ((from.flags & SOK_CENTERED) != 0 ? 1 : 0);
  to.gradient_scale = round(update.gradient_scale);
  to.weight_decay = decoupled ? 0.0f : round(from.weight_decay);
  to.decoupled_decay = decoupled ? round(from.learning_rate_of_decay * from.weight_decay) : 0.0f;
  to.learning_rate = round(from.learning_rate);
  to.momentum = round(from.momentum);
  to.one_minus_beta1 = round(1.0 - from.beta1);
  to.beta2 = round(from.beta2);
  to.one_minus_beta2 = round(1.0 - from.beta2);
  to.rho = round(from.rho);
  to.one_minus_rho = round(1.0 - from.rho);
  to.epsilon = round(from.epsilon);
  to.l1 = round(from.l1);
  to.two_l2 = round(2.0 * from.l2);
  to.two_l2_shrinkage = round(2.0 * from.l2_shrinkage);
  to.beta_over_lr = from.beta == 0.0 ? 0.0f : round(from.beta / from.learning_rate);
  to.power = round(-from.learning_rate_power);
  return to;
}

}  // namespace sok
