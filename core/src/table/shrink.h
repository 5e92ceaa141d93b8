// SPDX-License-Identifier: Apache-2.0
// What takes memory from a dynamic table, for every backend. Nothing fails here but a device.
#ifndef SOK_TABLE_SHRINK_H_
#define SOK_TABLE_SHRINK_H_

#include <cstdint>

#include "common/memory.h"
#include "sok/context.h"

namespace sok::cpu {

// Row i becomes row slots[i], for i in [0, n): slots ascend, and none is below its i.
void move_rows(const sok_context& context, char* rows, int64_t row_bytes, const int64_t* slots, int64_t n,
               const Buffer<char>& temporary);

// The number, for the host. On CUDA it waits.
int64_t fetch(const sok_context& context, const int64_t* number);

}  // namespace sok::cpu

#ifdef SOK_WITH_CUDA
namespace sok::cuda {

// temporary: for a row or more.
void move_rows(const sok_context& context, char* rows, int64_t row_bytes, const int64_t* slots, int64_t n,
               const Buffer<char>& temporary);
int64_t fetch(const sok_context& context, const int64_t* number);

}  // namespace sok::cuda
#endif

#endif  // SOK_TABLE_SHRINK_H_
