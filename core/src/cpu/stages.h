// SPDX-License-Identifier: Apache-2.0
// The stages on the CPU, one file each. Arguments have passed the checks of common/call.h; what tensors contain has
// not, and is checked here before it is used as an address. Each returns when its work is done and throws Error.
#ifndef SOK_CPU_STAGES_H_
#define SOK_CPU_STAGES_H_

#include <cstdint>
#include <vector>

#include "common/bag_parts.h"
#include "common/call.h"
#include "common/row_source.h"

namespace sok::cpu {

void bags_from_coordinates(const sok_context& context, const int64_t* rows, int64_t num_rows, int64_t stride,
                           int64_t num_bags, int64_t* row_splits, int64_t* order, int32_t* sorted);

// Of lookups of members: keys of the stacks go to `slots`. Row splits are checked.
void number_keys(const sok_context& context, const std::vector<Lookup>& lookups);

// sums: elements of sums in the message of each rank, behind its rows. Of routing.counts all columns are written.
void route(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
           const std::vector<int64_t>& sums, const Routing& routing);

void locate(const sok_context& context, const std::vector<Table>& tables, const std::vector<const sok_index*>& indices,
            const std::vector<Lookup>& lookups, uint32_t flags);

// combine and gather_combine.
void pool(const sok_context& context, const std::vector<Lookup>& lookups, const std::vector<RowSource>& sources);

void spread(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
            const std::vector<Vectors>& output_gradients, const UniqueRows& uniques, float* gradients);

// After route: writes the columns of its lookups.
void route_bags(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
                const BagParts& parts, const Routing& routing);

void combine_bags(const sok_context& context, const std::vector<Lookup>& lookups, const BagParts& parts,
                  const float* floats);

void copy(const sok_context& context, const std::vector<Copy>& copies);

void spread_bags(const sok_context& context, const std::vector<Lookup>& lookups, const BagParts& parts,
                 const std::vector<Vectors>& output_gradients, float* gradients);

void weight_gradient(const sok_context& context, const std::vector<Lookup>& lookups,
                     const std::vector<RowSource>& sources, const std::vector<Vectors>& output_gradients,
                     const std::vector<float*>& weight_gradients);

// Returns the number of distinct slots.
int64_t reduce(const sok_context& context, const Columns& table, const std::vector<Gradient>& gradients, int64_t* slots,
               float* values);

// Of the slots, but those below 0; slots nullptr: of the first n.
void set_generations(const sok_context& context, const int64_t* slots, int64_t n, const Generations& to);

// Of the first n slots of a table: all numbers of generations become lower, 0 at least. scores nullptr: there are none.
void lower_generations(const sok_context& context, const char* table, int64_t by, int64_t n, int32_t* since,
                       int64_t* scores);

// Before reduce and apply, of summands that are older than a change: that no slot has lost the key that it was located
// for.
void check_generations(const sok_context& context, const Columns& table, const std::vector<Gradient>& gradients);

void apply(const sok_context& context, const std::vector<Update>& updates, const Agreement& agreement);

void assign(const sok_context& context, const Columns& table, const Integers& slots, const Floats& values,
            const Floats& target);

void initialize(const sok_context& context, const sok_initializer& initializer, const InitialRows& rows);

void initialize_new(const sok_context& context, const std::vector<NewRows>& columns);

// initialize_new of one column, and its rows: [keys, dimension], of its dtype.
void initialize_and_read(const sok_context& context, const NewRows& column, void* rows);

// rows [keys, dimension], of the table's dtype: what is at each slot; where the slot is -1, the key's initial value.
void read_rows(const sok_context& context, const Columns& table, const sok_initializer& initializer,
               const Integers& keys, const int64_t* slots, void* rows);

// The same, at the slots of the keys in `index`.
void find_rows(const sok_context& context, const sok_hash_index& index, const Columns& table,
               const sok_initializer& initializer, const Integers& keys, void* rows);

}  // namespace sok::cpu

#endif  // SOK_CPU_STAGES_H_
