// SPDX-License-Identifier: Apache-2.0
// Where everything lies in what a call sends to the other ranks and gets from them.
//
// A count matrix says it: of the requester what it asks of each rank, of the owner what each rank asks of it. The row
// of a rank has the columns
//   num_tables   keys whose rows travel: the unique keys of the lookups that are pooled at the requester, by table
//   num_lookups  keys of the lookups that are pooled at the owner, 0 for the others
//   num_lookups  row splits of these: bags + 1 where the table lives on the owner's rank, else 0; 0 for the others
// A rank's message of keys is [those of rows, by table | those of bags, by lookup | row splits, by lookup], and the
// message of floats that answers it [rows, by table | sums, by lookup]; gradients travel as those. Which lookups are
// pooled where is the requester's choice alone (sok_choose_pooling), so sources may differ. Between the exchanges each
// kind is one array, by rank; where messages are of one kind alone they are that array.
#ifndef SOK_TENSORFLOW_MESSAGES_H_
#define SOK_TENSORFLOW_MESSAGES_H_

#include <vector>

#include "support.h"

namespace sok::tf {

// An array of which each rank's message holds a section.
struct Sections {
  std::vector<int64_t> sizes;  // for each rank
  int64_t total = 0;
};

// The bags of one lookup on one rank, pooled at the owner.
struct BagPart {
  int64_t rank;  // of the other side
  int table;     // its position
  int64_t num_keys, num_bags;
  int64_t first_key;    // among the keys of bags of all ranks
  int64_t first_split;  // among the row splits of all ranks
};

class Messages {
 public:
  static int64_t NumColumns(size_t num_tables, size_t num_lookups) {
    return static_cast<int64_t>(num_tables + 2 * num_lookups);
  }

  // Of a count matrix; checks its shape and that its numbers can be.
  //   dimensions     of each table
  //   lookup_tables  the position of each lookup's table
  absl::Status Read(const Tensor& counts, const std::vector<int64_t>& dimensions,
                    const std::vector<int64_t>& lookup_tables);

  int64_t num_ranks() const { return num_ranks_; }
  // [num_ranks, num_tables] keys whose rows travel, as the stages of rows take them.
  const std::vector<int64_t>& row_counts() const { return row_counts_; }
  // By rank, then by lookup; those of no bags too.
  const std::vector<BagPart>& parts() const { return parts_; }
  // For each lookup whether it is pooled at the owner. Of the requester's matrix.
  const std::vector<bool>& pooled() const { return pooled_; }

  // In messages of keys.
  const Sections& row_keys() const { return row_keys_; }
  const Sections& bag_keys() const { return bag_keys_; }
  const Sections& bag_splits() const { return bag_splits_; }
  int64_t num_keys() const { return row_keys_.total + bag_keys_.total; }
  // In messages of floats: elements.
  const Sections& rows() const { return rows_; }
  const Sections& sums() const { return sums_; }
  int64_t num_floats() const { return rows_.total + sums_.total; }

 private:
  int64_t num_ranks_ = 0;
  std::vector<int64_t> row_counts_;
  std::vector<BagPart> parts_;
  std::vector<bool> pooled_;
  Sections row_keys_, bag_keys_, bag_splits_, rows_, sums_;
};

// An array of rank 1 and its sections.
struct Sectioned {
  const Sections* sections;
  sok_tensor array;
};

// Writes messages, one after another by rank, each with its sections of the arrays in their order; and the reverse.
absl::Status JoinMessages(const CoreContext& core, const std::vector<Sectioned>& arrays, sok_tensor messages);
absl::Status TakeApart(const CoreContext& core, sok_tensor messages, const std::vector<Sectioned>& arrays);

// What came from the ranks as lookups of the owner's stages, in the order of its answers: of each rank the keys whose
// rows it wants, by table, then those of bags. keys, slots: [num_keys], as SokLocate gives them; splits: row splits of
// the bags; floats: the messages of floats, which are the lookups' outputs. What a stage does not read may be absent.
std::vector<sok_lookup> OwnerLookups(const Messages& messages, const std::vector<int64_t>& dimensions,
                                     const sok_tensor& keys, const sok_tensor& slots, const sok_tensor& splits,
                                     const sok_tensor& floats);

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
  std::vector<Sectioned> arrays(const Messages& messages) const;

  bool both_ = false;
  Tensor floats_, rows_, sums_;
};

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_MESSAGES_H_
