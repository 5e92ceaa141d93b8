// SPDX-License-Identifier: Apache-2.0
// sok/messages.h over tensors.
#ifndef SOK_TENSORFLOW_MESSAGES_H_
#define SOK_TENSORFLOW_MESSAGES_H_

#include <vector>

#include "support.h"

namespace sok::tf {

// The messages of one direction, between this rank and all.
class Messages {
 public:
  // Columns of the matrices of counts that ops give and take: those of sok/messages.h, and whether the rank failed.
  static int64_t NumColumns(size_t num_tables, size_t num_lookups) {
    return static_cast<int64_t>(num_tables + 2 * num_lookups + 1);
  }

  // Of a matrix in host memory; checks its shape and that its numbers can be. All arguments must outlive it.
  //   dimensions     of each table
  //   lookup_tables  the position of each lookup's table
  absl::Status Read(const Tensor& counts, const std::vector<int64_t>& dimensions,
                    const std::vector<int64_t>& lookup_tables);

  const sok_messages* get() const { return &view_; }
  const sok_messages* operator->() const { return &view_; }
  // Elements of the message of each rank.
  const std::vector<int64_t>& keys() const { return keys_; }
  const std::vector<int64_t>& floats() const { return floats_; }

  // View of the messages of keys for an op that needs them only where they hold row splits.
  sok_tensor SplitsIn(const Tensor& keys) const { return view_.num_bag_splits > 0 ? View(keys) : Absent(); }

  // What came as lookups (sok_owner_lookups).
  absl::Status Lookups(const sok_tensor& keys, const sok_tensor& slots, const sok_tensor& floats,
                       std::vector<sok_lookup>* lookups) const;

 private:
  std::vector<int64_t> keys_, floats_;
  sok_messages view_ = {};
};

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_MESSAGES_H_
