// SPDX-License-Identifier: Apache-2.0
// sok/messages.h over tensors: where everything lies in what a call sends to the other ranks and gets from them.
#ifndef SOK_TENSORFLOW_MESSAGES_H_
#define SOK_TENSORFLOW_MESSAGES_H_

#include <vector>

#include "sok/messages.h"
#include "support.h"

namespace sok::tf {

// A count matrix read.
class Messages {
 public:
  static int64_t NumColumns(size_t num_tables, size_t num_lookups) {
    return static_cast<int64_t>(num_tables + 2 * num_lookups);
  }

  // Checks its shape and that its numbers can be. It borrows `counts`, and the vectors.
  //   counts         [num_ranks, NumColumns] int64, and maybe more columns
  //   dimensions     of each table
  //   lookup_tables  the position of each lookup's table
  absl::Status Read(const Tensor& counts, const std::vector<int64_t>& dimensions,
                    const std::vector<int64_t>& lookup_tables);

  int32_t num_ranks() const { return layout_.num_ranks; }
  // [num_ranks, num_tables] keys whose rows travel, as the stages of rows take them.
  const std::vector<int64_t>& row_counts() const { return row_counts_; }
  // For each lookup whether it is pooled at the owner. Of the requester's matrix.
  const std::vector<bool>& pooled() const { return pooled_; }

  // Elements of a section of all ranks.
  int64_t total(sok_section section) const { return totals_[section]; }
  int64_t num_keys() const { return total(SOK_SECTION_KEYS) + total(SOK_SECTION_BAG_KEYS); }
  int64_t num_floats() const { return total(SOK_SECTION_ROWS) + total(SOK_SECTION_SUMS); }
  // In the messages from or to one rank.
  int64_t key_elements(int64_t rank) const { return Elements(SOK_SECTION_KEYS, SOK_SECTION_ROWS, rank); }
  int64_t float_elements(int64_t rank) const { return Elements(SOK_SECTION_ROWS, SOK_NUM_SECTIONS, rank); }

  // Messages of keys or floats of their sections, and the reverse. first: SOK_SECTION_KEYS or SOK_SECTION_ROWS.
  absl::Status Join(const CoreContext& core, sok_section first, const std::vector<sok_tensor>& sections,
                    sok_tensor messages) const;
  absl::Status Split(const CoreContext& core, sok_section first, sok_tensor messages,
                     const std::vector<sok_tensor>& sections) const;

  // sok_message_lookups.
  absl::Status OwnerLookups(const sok_tensor& keys, const sok_tensor& slots, const sok_tensor& splits,
                            const sok_tensor& floats, std::vector<sok_lookup>* lookups) const;

 private:
  int64_t Elements(int first, int end, int64_t rank) const;

  sok_message_layout layout_ = {};
  int64_t totals_[SOK_NUM_SECTIONS] = {};
  std::vector<int64_t> row_counts_, sizes_;
  std::vector<sok_message_part> parts_;
  std::vector<bool> pooled_;
};

// The rows and the sums of messages of floats: views of the messages where these hold one of the two, else temporary.
class RowsAndSums {
 public:
  // Checks the size of `floats`, and makes room.
  absl::Status Allocate(OpKernelContext* ctx, const Messages& messages, const Tensor& floats);

  // From what came to what an op reads, and from what an op wrote to what it sends.
  absl::Status TakeApart(const CoreContext& core, const Messages& messages);
  absl::Status Join(const CoreContext& core, const Messages& messages);

  sok_tensor rows() const { return View(rows_); }
  sok_tensor sums() const { return View(sums_); }

 private:
  bool both_ = false;
  Tensor floats_, rows_, sums_;
};

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_MESSAGES_H_
