// SPDX-License-Identifier: Apache-2.0
#include "table/index.h"

#include <algorithm>
#include <string>

#include "common/status.h"

namespace sok {
namespace {

void check_index(const TableId& table, const sok_index* index) {
  SOK_CHECK(index == nullptr || index->struct_size == sizeof(sok_index), "table '", table.name,
            "': index.struct_size is ", index->struct_size, ", must be ", sizeof(sok_index));
  SOK_CHECK(index == nullptr || index->locate != nullptr, "table '", table.name, "': index.locate is NULL");
}

}  // namespace

std::vector<const sok_index*> check_indices(const std::vector<Table>& tables, const sok_index* const* indices) {
  std::vector<const sok_index*> result(tables.size(), nullptr);
  if (indices != nullptr) std::copy_n(indices, tables.size(), result.begin());
  for (size_t t = 0; t < tables.size(); ++t) {
    const sok_index* const index = result[t];
    check_index(tables[t], index);
    SOK_CHECK(index != nullptr || tables[t].placement.num_rows != Placement::kAnyKey, "table '", tables[t].name,
              "': any integer is its key, so it needs an index");
  }
  return result;
}

std::vector<const sok_index*> check_indices(const sok_context& context, const std::vector<Columns>& tables) {
  std::vector<const sok_index*> result;
  result.reserve(tables.size());
  for (const Columns& table : tables) {
    check_index(table, table.index);
    SOK_CHECK_STATUS(SOK_UNIMPLEMENTED, table.index == nullptr || context.device.type == SOK_CPU, "table '", table.name,
                     "': rows are found by key on the CPU alone");
    result.push_back(table.index);
  }
  return result;
}

bool any_index(const std::vector<const sok_index*>& indices) {
  return std::any_of(indices.begin(), indices.end(), [](const sok_index* index) { return index != nullptr; });
}

void ask_indices(const sok_context& context, const std::vector<const sok_index*>& indices,
                 const std::vector<Lookup>& lookups, uint32_t flags) {
  const auto index_of = [&](const Lookup& lookup) { return indices[static_cast<size_t>(lookup.table)]; };
  std::vector<decltype(sok_index::locate)> asked;
  for (const Lookup& first : lookups) {
    if (index_of(first) == nullptr) continue;
    const auto kind = index_of(first)->locate;
    if (std::find(asked.begin(), asked.end(), kind) != asked.end()) continue;
    asked.push_back(kind);
    std::vector<sok_index_request> requests;
    for (const Lookup& lookup : lookups) {
      const sok_index* const index = index_of(lookup);
      if (index == nullptr || index->locate != kind || lookup.keys.size == 0) continue;
      const int32_t dtype = lookup.keys.is_64bit ? SOK_INT64 : SOK_INT32;
      requests.push_back(
          {index, {const_cast<void*>(lookup.keys.data), dtype, 1, {lookup.keys.size, 1}, 0}, lookup.slots});
    }
    if (requests.empty()) continue;
    set_last_error(SOK_OK, "");
    const int status = kind(&context, static_cast<int32_t>(requests.size()), requests.data(), flags);
    if (status == SOK_OK) continue;
    const std::string message = sok_last_error_message();  // of an index of the library's own
    if (!message.empty()) throw Error(static_cast<sok_status>(status), message);
    fail(static_cast<sok_status>(status), "table '", first.id.name,
         "': its index, or that of another table of the call, returned ", sok_status_name(status));
  }
}

}  // namespace sok
