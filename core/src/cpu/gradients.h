// SPDX-License-Identifier: Apache-2.0
// The summands of the gradients of tables, grouped by slot and ready to be summed: what reduce and apply share.
#ifndef SOK_CPU_GRADIENTS_H_
#define SOK_CPU_GRADIENTS_H_

#include <vector>

#include "cpu/group.h"
#include "cpu/kernels/kernels.h"

namespace sok::cpu {

class GroupedGradients {
 public:
  struct Source {
    const Columns* table;
    const std::vector<Gradient>* summands;
  };
  enum class Slots { kAscending, kAnyOrder };

  // Checks row splits and slots of all summands. With kAnyOrder a summand that is alone and unique is taken as it is.
  GroupedGradients(const sok_context& context, const std::vector<Source>& sources, Slots slots);

  struct Result {
    int64_t count;  // distinct slots
    Segments segments;
    const uint32_t* slots32;
    const int64_t* slots64;
  };
  Result operator[](size_t source) const;

 private:
  // Entries carry the number of their row, or, when any summand has weights, their own number; both run through the
  // summands.
  struct Summand {
    const Gradient* gradient;
    int64_t first_entry, first_row;
    int64_t bags_per_piece;
  };
  struct Plan {
    const Columns* table = nullptr;
    std::vector<Summand> summands;
    Chunks pieces;
    bool as_given = false;  // no grouping needed
    bool by_entry = false, scaled = false, by_pointer = false;
    int64_t numbers = 0;  // payloads are below it
    float* scales = nullptr;
    const float** rows = nullptr;
  };

  static Plan plan(const Source& source, Slots slots);
  template <typename Entry>
  static void fill(const Plan& plan, int64_t piece, Entry* entries);
  template <typename Slot, typename Entry>
  static void fill_entries(const Plan& plan, const Summand& summand, int64_t begin, int64_t end, Entry* entries);
  static void fill_sources(const Plan& plan, const Summand& summand, int64_t begin, int64_t end);

  std::vector<Plan> plans_;
  Buffer<float> scales_;
  Buffer<const float*> rows_;
  std::vector<Groups> groups_;  // one
};

}  // namespace sok::cpu

#endif  // SOK_CPU_GRADIENTS_H_
