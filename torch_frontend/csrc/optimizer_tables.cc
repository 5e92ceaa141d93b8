// SPDX-License-Identifier: Apache-2.0
#include "optimizer_tables.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "context.h"
#include "error_records.h"
#include "exchange.h"
#include "ops.h"
#include "sok/gradient.h"
#include "status.h"
#include "views.h"

namespace sok_torch {
namespace {

constexpr size_t kFields = 13;

sok_optimizer optimizer_of(int64_t kind, int64_t flags, const double* field) {
  return {sizeof(sok_optimizer),
          static_cast<int32_t>(kind),
          static_cast<uint32_t>(flags),
          field[0],
          field[1],
          field[2],
          field[3],
          field[4],
          field[5],
          field[6],
          field[7],
          field[8],
          field[9],
          field[10],
          field[11],
          field[12]};
}

// Lets autograd notice that what it saved of a tensor is no longer what it was.
void bump(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) tensor.unsafeGetTensorImpl()->bump_version();
}

// This rank's word to the others, given once: at its end, if not before, that this rank cannot do its part of a step.
class Agreement {
 public:
  Agreement(int64_t exchange, at::Device device, bool wait) : device_(device), wait_(wait) {
    if (exchange >= 0) exchange_ = Exchange::find(exchange);
  }
  ~Agreement() {
    try {
      tell(true);
    } catch (...) {  // what brought this about is being thrown
    }
  }
  Agreement(const Agreement&) = delete;
  Agreement& operator=(const Agreement&) = delete;

  void tell(bool failed) {
    if (const auto exchange = std::exchange(exchange_, {}); exchange.defined()) exchange->agree(device_, failed, wait_);
  }
  void wait() { wait_ = true; }

 private:
  c10::intrusive_ptr<Exchange> exchange_;
  at::Device device_;
  bool wait_;
};

// The updates of a step: a call of the core for each device, within the agreement of the one before, so that all tables
// change or none. Those on GPUs, whose errors are known last, come last.
class Updates {
 public:
  Updates(const std::vector<sok_update>& updates, const std::vector<at::Device>& devices) {
    for (const bool on_gpu : {false, true}) {
      for (size_t i = 0; i < updates.size(); ++i) {
        if (devices[i].is_cuda() != on_gpu) continue;
        const auto same = [&](const Call& call) { return call.device == devices[i]; };
        auto call = std::find_if(calls_.begin(), calls_.end(), same);
        if (call == calls_.end()) call = calls_.insert(call, {devices[i], {}});
        call->updates.push_back(updates[i]);
      }
    }
  }

  bool on_several_devices() const { return calls_.size() > 1; }

  // alone: there is no other rank.
  void apply(Agreement* agreement, bool alone) {
    agreement_ = agreement;
    alone_ = alone;
    try {
      apply_rest();
    } catch (...) {
      if (error_) std::rethrow_exception(error_);
      throw;
    }
  }

 private:
  struct Call {
    at::Device device;
    std::vector<sok_update> updates;
  };

  void apply_rest() {
    const Call& call = calls_[next_++];
    // With several ranks what the device found before is raised by the next lookup, on all of them.
    const Context context(call.device, alone_ ? Earlier::kRaised : Earlier::kLeft);
    const bool asks = next_ < calls_.size() || !alone_;
    SOK_CALL(sok_apply(context.get(), static_cast<int32_t>(call.updates.size()), call.updates.data(),
                       asks ? Updates::agree : nullptr, this));
    if (alone_ && on_several_devices() && call.device.is_cuda()) {
      c10::impl::VirtualGuardImpl(call.device.type()).getStream(call.device).synchronize();
      check_error_record(call.device.index());
    }
  }

  // As sok_agree.
  static int agree(void* opaque) {
    auto* const self = static_cast<Updates*>(opaque);
    try {
      if (self->next_ < self->calls_.size()) {
        self->apply_rest();
      } else {
        self->agreement_->tell(false);
      }
    } catch (...) {
      if (!self->error_) self->error_ = std::current_exception();
    }
    return self->error_ ? 1 : 0;
  }

  std::vector<Call> calls_;
  size_t next_ = 0;
  Agreement* agreement_ = nullptr;
  bool alone_ = true;
  std::exception_ptr error_;
};

}  // namespace

OptimizerTables::OptimizerTables(std::vector<at::Tensor> tables, std::vector<int64_t> gradients,
                                 std::vector<std::string> names)
    : tables_(tables), gradients_(find_gradients(gradients)), names_(std::move(names)) {
  TORCH_CHECK_VALUE(gradients_.size() == tables.size() && names_.size() == tables.size(),
                    "tables need one gradient and one name each");
}

std::tuple<std::optional<std::vector<int64_t>>, std::vector<int64_t>> OptimizerTables::waiting() const {
  const std::vector<bool> left = TableGradient::have_entries(gradients_);
  std::vector<int64_t> positions, looked_at;
  for (size_t i = 0; i < left.size(); ++i) {
    const at::TensorImpl* const table = tables_[i];
    const bool shown = table != nullptr && table->grad().defined();
    if (shown) looked_at.push_back(static_cast<int64_t>(i));
    if (shown || left[i]) positions.push_back(static_cast<int64_t>(i));
  }
  if (positions.size() == left.size() && !left.empty()) return {std::nullopt, looked_at};
  return {std::move(positions), std::move(looked_at)};
}

void OptimizerTables::forget() const {
  TableGradient::forget(gradients_);
  for (size_t i = 0; i < tables_.size(); ++i) {
    at::TensorImpl* const table = tables_[i];
    if (table != nullptr && table->grad().defined()) table->mutable_grad().reset();
  }
}

void OptimizerTables::set_run(int64_t run, std::vector<int64_t> tables, std::vector<at::Tensor> counts) {
  TORCH_CHECK_VALUE(run >= 0 && run <= static_cast<int64_t>(runs_.size()), "there are ", runs_.size(), " runs");
  TORCH_CHECK_VALUE(counts.empty() || counts.size() == tables.size(), "a run needs one step count a table, or none");
  for (const int64_t table : tables) {
    TORCH_CHECK_VALUE(table >= 0 && table < static_cast<int64_t>(tables_.size()), "there is no table ", table);
  }
  runs_.erase(runs_.begin() + run, runs_.end());
  runs_.push_back({std::move(tables), {}, {}, WeakTensors(std::vector<at::Tensor>()), WeakTensors(counts)});
}

void OptimizerTables::set_states(int64_t run, std::vector<std::string> keys, std::vector<int64_t> rowwise,
                                 std::vector<at::Tensor> states) {
  Run& of = runs_.at(run);
  TORCH_CHECK_VALUE(
      keys.size() == rowwise.size() && keys.size() <= SOK_MAX_STATES && states.size() == keys.size() * of.tables.size(),
      "a run needs one state of each kind a table");
  of.keys = std::move(keys);
  of.rowwise = std::move(rowwise);
  of.states = WeakTensors(states);
}

std::optional<double> OptimizerTables::common_count(int64_t run) const {
  return common_number(BorrowedTensors(runs_.at(run).counts).get());
}

void OptimizerTables::check_state(const Run& run, size_t kind, int64_t position, const at::Tensor& state) const {
  const at::TensorImpl* const table = tables_[position];
  const at::IntArrayRef wanted = run.rowwise[kind] != 0 ? table->sizes().slice(0, 1) : table->sizes();
  TORCH_CHECK_VALUE(state.layout() == at::kStrided && state.scalar_type() == at::kFloat && state.is_contiguous() &&
                        state.device() == table->device() && state.sizes() == wanted,
                    "the optimizer state '", run.keys[kind], "' of table '", names_[position], "' is ", state.sizes(),
                    " ", state.scalar_type(), " on ", state.device(), ", must be ", wanted,
                    " float32 and contiguous on ", table->device(),
                    "; a state_dict loads with as many ranks as it was saved with, that of float16 and bfloat16 tables "
                    "through OptimizerWrapper.load_state_dict");
}

void OptimizerTables::step(std::vector<int64_t> runs, std::vector<int64_t> kinds, std::vector<int64_t> flags,
                           std::vector<double> settings, std::vector<double> scales, std::vector<int64_t> counted,
                           std::vector<int64_t> given, std::vector<int64_t> gradients, std::vector<at::Tensor> stamps,
                           std::vector<int64_t> stamped, int64_t stamp, int64_t exchange, bool wait) const {
  const size_t num_runs = runs.size();
  TORCH_CHECK_VALUE(kinds.size() == num_runs && flags.size() == num_runs && scales.size() == num_runs &&
                        settings.size() == kFields * num_runs && given.size() == gradients.size() &&
                        stamps.size() == stamped.size(),
                    "a step needs one kind, ... and ", kFields, " settings a run");
  const BorrowedTensors borrowed(tables_);
  const at::TensorList tables = borrowed.get();
  TORCH_CHECK(tables.size() == tables_.size(), "a table of the optimizer is gone");
  const IndexedTable::Use use(tables, true);
  Agreement agreement(exchange, tables.empty() ? at::Device(at::kCPU) : tables[0].device(), wait);
  const auto [entries, first] = TableGradient::entries_of(gradients_, given, gradients);

  // Reserved, so that what points into them stays valid.
  std::vector<sok_optimizer> optimizers;
  std::vector<sok_columns> shards;
  std::vector<Summands> summands;
  std::vector<sok_update> updates;
  const CallGradient* checked = nullptr;
  std::vector<int64_t> place(tables.size(), -1);  // of each table's update
  optimizers.reserve(num_runs);
  shards.reserve(tables.size());
  summands.reserve(tables.size());
  updates.reserve(tables.size());
  for (size_t r = 0; r < num_runs; ++r) {
    const Run& run = runs_.at(runs[r]);
    const BorrowedTensors of_run(run.states);
    const at::TensorList states = of_run.get();
    TORCH_CHECK(states.size() == run.keys.size() * run.tables.size(), "a state of the optimizer is gone");
    optimizers.push_back(optimizer_of(kinds[r], flags[r], settings.data() + kFields * r));
    for (size_t member = 0; member < run.tables.size(); ++member) {
      const int64_t table = run.tables[member];
      TORCH_CHECK_VALUE(place[table] < 0, "table ", names_[table], " is in two runs");
      place[table] = static_cast<int64_t>(updates.size());
      shards.push_back(make_columns(tables[table], names_[table].c_str()));
      const auto own = at::ArrayRef<Entry>(entries).slice(first[table], first[table + 1] - first[table]);
      check(own, &checked);
      sok_update update = SOK_UPDATE_INIT;
      update.table = &shards.back();
      update.optimizer = &optimizers.back();
      at::ArrayRef<sok_gradient> views;
      if (own.size() == 1) {  // as mostly
        views = own[0].call->summands(own[0].position);
        update.gradient_scale = scales[r] * own[0].scale;
      } else {
        summands.push_back(summands_of(own, tables[table].device()));
        views = summands.back().views;
        update.gradient_scale = scales[r] * summands.back().scale;
      }
      update.num_gradients = static_cast<int32_t>(views.size());
      update.gradients = views.data();
      update.num_states = static_cast<int32_t>(run.keys.size());
      for (size_t kind = 0; kind < run.keys.size(); ++kind) {
        const at::Tensor& state = states[kind * run.tables.size() + member];
        check_state(run, kind, table, state);
        update.states[kind] = view(state, "optimizer state");
      }
      updates.push_back(update);
    }
  }
  if (updates.empty()) return agreement.tell(false);
  for (size_t i = 0; i < stamps.size(); ++i) {
    const int64_t update = place.at(stamped[i]);
    TORCH_CHECK_VALUE(update >= 0, "stamps of a table that takes no step");
    updates[update].stamps = view(stamps[i], "stamps");
    updates[update].stamp = stamp;
  }
  std::vector<at::Device> devices;
  devices.reserve(updates.size());
  for (const int64_t run : runs) {
    for (const int64_t table : runs_.at(run).tables) devices.push_back(tables[table].device());
  }
  Updates calls(updates, devices);
  if (calls.on_several_devices()) agreement.wait();
  try {
    calls.apply(&agreement, exchange < 0);
  } catch (...) {
    agreement.tell(true);  // throws what was kept before, which this may follow from
    throw;
  }
  for (size_t i = 0; i < tables.size(); ++i) {
    if (place[i] >= 0) tables[i].unsafeGetTensorImpl()->bump_version();
  }
  bump(stamps);
  for (const int64_t run : runs) bump(BorrowedTensors(runs_[run].states).get());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const int64_t run : counted) count_up(BorrowedTensors(runs_.at(run).counts).get());
}

}  // namespace sok_torch
