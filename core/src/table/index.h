// SPDX-License-Identifier: Apache-2.0
// What locate asks of the indices of tables (sok_index), the same on every backend.
#ifndef SOK_TABLE_INDEX_H_
#define SOK_TABLE_INDEX_H_

#include <vector>

#include "common/call.h"

namespace sok {

// One for each table; nullptr: its slots are those that its placement names.
std::vector<const sok_index*> check_indices(const std::vector<Table>& tables, const sok_index* const* indices);

// The same of tables whose rows are known; nullptr: lookups name them by slot. Rows are found by key on the CPU alone.
std::vector<const sok_index*> check_indices(const sok_context& context, const std::vector<Columns>& tables);

// Whether some have one: then a call may change tables, and is to find what is wrong with its lookups before.
bool any_index(const std::vector<const sok_index*>& indices);

// Fills in the slots of the lookups whose tables have an index: one call for all indices of a kind.
void ask_indices(const sok_context& context, const std::vector<const sok_index*>& indices,
                 const std::vector<Lookup>& lookups, uint32_t flags);

}  // namespace sok

#endif  // SOK_TABLE_INDEX_H_
