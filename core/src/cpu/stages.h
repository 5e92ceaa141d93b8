// SPDX-License-Identifier: Apache-2.0
// The stages on the CPU, one file each. Arguments have passed the checks of common/call.h; what tensors contain has
// not, and is checked here before it is used as an address. Each returns when its work is done and throws Error.
#ifndef SOK_CPU_STAGES_H_
#define SOK_CPU_STAGES_H_

#include <cstdint>
#include <vector>

#include "common/bag_parts.h"
#include "common/call.h"

namespace sok::cpu {

void bags_from_coordinates(const sok_context& context, const int64_t* rows, int64_t num_rows, int64_t stride,
                           int64_t num_bags, int64_t* row_splits, int64_t* order, int32_t* sorted);

void route(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
           const Routing& routing);

void locate(const sok_context& context, const std::vector<Table>& tables, int32_t num_sources, const int64_t* counts,
            const int64_t* keys, int64_t* slots, uint32_t flags);

void gather(const sok_context& context, const std::vector<Table>& tables, int32_t num_sources, const int64_t* counts,
            const int64_t* keys, const int64_t* slots, const Floats& rows);

void combine(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
             const int64_t* inverse, const Floats& rows, int64_t num_elements);

void gather_combine(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups);

void spread(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
            const std::vector<Vectors>& output_gradients, const int64_t* counts, const int32_t* order,
            const int32_t* unique_splits, float* gradients);

void route_bags(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
                const BagParts& parts, const BagRouting& routing);

void combine_bags(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
                  const BagParts& parts, const float* scales, const float* sums);

void copy(const sok_context& context, const std::vector<Copy>& copies);

void spread_bags(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
                 const BagParts& parts, const std::vector<Vectors>& output_gradients, const float* scales,
                 float* gradients);

// `inverse` == nullptr: rows are those of the tables.
void weight_gradient(const sok_context& context, const std::vector<Table>& tables, const std::vector<Lookup>& lookups,
                     const std::vector<Vectors>& output_gradients, const int64_t* inverse, const Floats& rows,
                     int64_t num_elements, const std::vector<float*>& weight_gradients);

// Returns the number of distinct slots.
int64_t reduce(const sok_context& context, const Table& table, const std::vector<Gradient>& gradients, int64_t* slots,
               float* values);

void apply(const sok_context& context, const std::vector<Update>& updates);
void check_apply(const sok_context& context, const std::vector<Update>& updates);

void assign(const sok_context& context, const Table& table, const Integers& keys, const Floats& values,
            const Floats& target);

void initialize(const sok_context& context, const sok_initializer& initializer, const int64_t* keys, int64_t first_key,
                int64_t key_stride, int64_t num_rows, int64_t dimension, const Floats& rows);

}  // namespace sok::cpu

#endif  // SOK_CPU_STAGES_H_
