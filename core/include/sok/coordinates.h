/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinates of sparse tensors say which keys of a batch belong together; every stage takes row splits (CSR). */
#ifndef SOK_COORDINATES_H_
#define SOK_COORDINATES_H_

#include "sok/context.h"
#include "sok/export.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Turns coordinates (one row number an entry, in any order) into row splits.
 *   rows        [n] or [n, k] SOK_INT64: the row of each entry; of a rank-2 view column 0 is read
 *   num_bags    rows of the batch, >= 0
 *   row_splits  out [num_bags + 1] SOK_INT64
 *   order       out [n] SOK_INT64: the entries sorted by row, entries of a row in their given order
 *   sorted      out [1] SOK_INT32: 1 when the rows never decrease, so that `order` is 0, 1, ..., n-1
 * Errors: SOK_OUT_OF_RANGE when a row is outside [0, num_bags); the outputs are undefined then. */
SOK_EXPORT int sok_bags_from_coordinates(const sok_context* context, sok_tensor rows, int64_t num_bags,
                                         sok_tensor row_splits, sok_tensor order, sok_tensor sorted);

#ifdef __cplusplus
}
#endif
#endif /* SOK_COORDINATES_H_ */
