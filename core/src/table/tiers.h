// SPDX-License-Identifier: Apache-2.0
// Rows of a dynamic table in two memories (sok_dynamic_table_config::device_rows): those of the first slots are in the
// device's, those of all others in the host's, which kernels reach too, slowly. Rows that a call asks for and that are
// in the host's change places with rows of the first slots that would be given up first, and so do what an optimizer
// keeps of them, the index's entries, scores and generations. Rows that the running step uses stay where they are:
// their slots are known outside.
//
// Such calls of one table come one after the other; those that prefetch run on a stream of their own, beside a step.
#ifndef SOK_TABLE_TIERS_H_
#define SOK_TABLE_TIERS_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "common/call.h"
#include "sok/context.h"
#include "sok/dynamic_table.h"
#include "table/eviction.h"
#include "table/hash_index.h"
#include "table/reserved_range.h"

namespace sok {

class Tiers {
 public:
  virtual ~Tiers() = default;
  Tiers(const Tiers&) = delete;
  Tiers& operator=(const Tiers&) = delete;

  int64_t device_rows() const { return device_rows_; }
  int64_t bytes() const { return bits_->backed_bytes(); }

  // Throws Error.
  void grow(int64_t slots) { bits_->grow(bytes_of_bits(std::max<int64_t>(0, slots - device_rows_))); }
  // Two for each slot.
  static int64_t bytes_of_bits(int64_t slots) { return 2 * ((slots + 31) / 32) * int64_t{sizeof(uint32_t)}; }

  // Adds hits and moves as far as the host has heard.
  virtual void add_counts(sok_dynamic_table_counts& counts) const = 0;
  // What is enqueued on the context's stream from now on comes after what prefetches. Throws Error, as what follows.
  virtual void join(const sok_context& context) = 0;

 protected:
  Tiers(int64_t device_rows, std::unique_ptr<ReservedRange> bits) : device_rows_(device_rows), bits_(std::move(bits)) {}

  const int64_t device_rows_;
  const std::unique_ptr<ReservedRange> bits_;
};

// A table in a call that brings rows.
struct TierRequest {
  struct Column {
    char* data;
    int64_t bytes;  // of a slot
  };
  struct Slots {
    int64_t* slots;  // of keys of the call, -1 is none; become those that the rows have afterwards
    int64_t size;
  };
  sok_hash_index* index;
  Eviction* eviction;
  Tiers* tiers;
  std::vector<Column> columns;
  int32_t* since;
  int32_t generation;
  std::vector<Slots> slots;
};

}  // namespace sok

#ifdef SOK_WITH_CUDA
namespace sok::cuda {

// bits: of all slots beyond device_rows that there may be.
std::unique_ptr<Tiers> make_tiers(int64_t device_rows, std::unique_ptr<ReservedRange> bits);

// Enqueues, on the context's stream. Where `is_ahead`, for a step to come: uses by the call's keys do not count, but
// are their last.
void bring_rows(const sok_context& context, const std::vector<TierRequest>& requests, bool is_ahead);

// Copies of `keys`, on the context's stream, and then, on a stream of the first of `tiers` that has waited for it and
// for the others, body(its context, the copies).
void ahead(const sok_context& context, const std::vector<Tiers*>& tiers, const std::vector<Integers>& keys,
           const std::function<void(const sok_context&, const std::vector<Integers>&)>& body);

}  // namespace sok::cuda
#endif

#endif  // SOK_TABLE_TIERS_H_
