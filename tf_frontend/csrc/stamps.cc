// SPDX-License-Identifier: Apache-2.0
// track_rows: tells the process which variable holds the stamps of a table's rows.
#include "stamps.h"

#include <atomic>
#include <unordered_map>
#include <utility>

#include "gpu.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok::tf {
namespace {

// Of all sessions and eager contexts of the process. Never destroyed: variables may outlive what is static.
class TrackedTables {
 public:
  static TrackedTables& Get() {
    static auto* const tables = new TrackedTables;
    return *tables;
  }

  void Add(Var* table, VarPtr stamps) {
    // The notifier runs as the table dies, before its address can be that of another variable.
    Entry entry{::tensorflow::core::WeakPtr<Var>(table, [this, table] { Remove(table); }), std::move(stamps)};
    const ::tensorflow::mutex_lock lock(mutex_);
    std::swap(entries_[table], entry);
    num_entries_.store(entries_.size());
  }

  VarPtr StampsOf(const Var* table) {
    if (num_entries_.load() == 0) return nullptr;
    const ::tensorflow::mutex_lock lock(mutex_);
    const auto it = entries_.find(table);
    if (it == entries_.end()) return nullptr;
    Var* const stamps = it->second.stamps.get();
    stamps->Ref();
    return VarPtr(stamps);
  }

 private:
  struct Entry {
    ::tensorflow::core::WeakPtr<Var> table;
    VarPtr stamps;
  };

  void Remove(const Var* table) {
    Entry entry;  // destroyed after the lock is free
    const ::tensorflow::mutex_lock lock(mutex_);
    const auto it = entries_.find(table);
    if (it == entries_.end()) return;
    entry = std::move(it->second);
    entries_.erase(it);
    num_entries_.store(entries_.size());
  }

  ::tensorflow::mutex mutex_;
  std::unordered_map<const Var*, Entry> entries_;
  std::atomic<size_t> num_entries_{0};
};

}  // namespace

void TrackRows(Var* table, VarPtr stamps) { TrackedTables::Get().Add(table, std::move(stamps)); }

VarPtr StampsOf(const Var* table) { return TrackedTables::Get().StampsOf(table); }

REGISTER_OP("SokTrackRows")
    .Input("table: resource")
    .Input("stamps: resource")
    .SetIsStateful()
    .SetShapeFn([](::tensorflow::shape_inference::InferenceContext*) { return absl::OkStatus(); })
    .Doc(
        "From now on SokApply writes the UTC time in nanoseconds into `stamps` for the rows of `table` that it "
        "changes.\n\n"
        "table: the variable of a table.\n"
        "stamps: an int64 variable on the same device, [rows of `table`], or [0] where it is not wanted (yet).\n");

class TrackRowsOp : public ::tensorflow::OpKernel {
 public:
  explicit TrackRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    VarPtr table, stamps;
    OP_REQUIRES_OK(ctx, LookupResource(ctx, ::tensorflow::HandleFromInput(ctx, 0), &table));
    OP_REQUIRES_OK(ctx, LookupResource(ctx, ::tensorflow::HandleFromInput(ctx, 1), &stamps));
    TrackRows(table.get(), std::move(stamps));
  }
};

SOK_REGISTER_KERNELS("SokTrackRows", TrackRowsOp);

}  // namespace sok::tf
