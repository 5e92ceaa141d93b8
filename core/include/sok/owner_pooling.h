/* SPDX-License-Identifier: Apache-2.0 */
/* Pooling at the owner: instead of rows, sums of rows travel.
 *
 * Each bag is cut into parts, one for each rank that its table lives on: all ranks for a distributed table, its owner
 * for a localized one. A part is the bag's keys that this rank owns, duplicates included. The owner sums the rows of a
 * part, the requester adds the parts up and applies the combiner:
 *
 *   route_bags -> exchange -> locate -> gather_combine -> exchange -> combine_bags      (forward)
 *   spread_bags -> exchange -> reduce -> apply                                       (backward)
 *
 * It pays where bags hold several keys a rank that hardly repeat in the batch; else route, gather, combine and spread
 * move less. The gradient of a lookup's weights needs rows at the requester, so lookups with weights are not pooled
 * this way.
 *
 * Send order is by rank, then by lookup; "here(r, i)" says that the table of lookup i lives on rank r. Only parts of
 * lookups with here(r, i) exist, those of empty bags too. */
#ifndef SOK_OWNER_POOLING_H_
#define SOK_OWNER_POOLING_H_

#include "sok/context.h"
#include "sok/export.h"
#include "sok/lookup.h"
#include "sok/table.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Which lookups of a batch are better pooled at the owner, by the bytes that would travel: pooled[i] is 1 for lookups
 * with row splits and without weights whose parts of bags are clearly fewer than the rows they would need, else 0.
 * Looks at shapes alone; ranks need not agree. SOK_POOLING=owner (wherever it is possible) or requester (never) decides
 * instead.
 *   pooled  out, host [num_lookups]
 * Errors: SOK_INVALID_ARGUMENT, also for another value of SOK_POOLING. */
SOK_EXPORT int sok_choose_pooling(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                                  int32_t num_lookups, const sok_lookup* lookups, int32_t* pooled);

/* What route_bags makes of a batch; every array belongs to the caller. n: entries of the call. */
typedef struct sok_bag_routing {
  size_t struct_size; /* sizeof(sok_bag_routing) */
  sok_tensor keys;    /* [n] SOK_INT64: the keys in send order, those of a lookup as they came */
  sok_tensor counts;  /* [num_ranks, num_lookups] SOK_INT64: how many keys go to each rank for each lookup */
  sok_tensor splits;  /* [sum of bags_i + 1 over r and i with here(r, i)] SOK_INT64: for each rank, for each lookup, the
                         row splits of its parts, from 0 to counts[r, i] */
  sok_tensor scales;  /* [bags of the call] SOK_FLOAT32: what the sum of a bag is multiplied with: 1 for SOK_SUM;
                         of a bag of k keys 1 / k for SOK_MEAN, 1 / sqrt(k) for SOK_SQRTN, 0 for k = 0 */
} sok_bag_routing;

#define SOK_BAG_ROUTING_INIT {sizeof(sok_bag_routing), SOK_NO_TENSOR, SOK_NO_TENSOR, SOK_NO_TENSOR, SOK_NO_TENSOR}

/* route_bags: checks the keys and cuts the bags of lookups without weights. The caller allocates every array of
 * *routing.
 * Errors: SOK_OUT_OF_RANGE names table, key and range; SOK_INVALID_ARGUMENT. The outputs are undefined then. */
SOK_EXPORT int sok_route_bags(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                              int32_t num_lookups, const sok_lookup* lookups, const sok_bag_routing* routing);

/* combine_bags: exchanged sums -> one vector a bag, in lookups[i].output.
 *   lookups  as given to route_bags; of keys only the number is used
 *   scales   as route_bags wrote them
 *   sums     rank 1, SOK_FLOAT32: for each rank r and lookup with here(r, i) [bags_i, dimension] */
SOK_EXPORT int sok_combine_bags(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                                int32_t num_lookups, const sok_lookup* lookups, sok_tensor scales, sok_tensor sums);

/* spread_bags: output gradients -> the gradient of each part's sum. On the owner they are the `values` of gradient
 * parts (sok/gradient.h) whose slots and row_splits are what gather_combine read, with SOK_SUM.
 *   output_gradients  [num_lookups] host array of views [bags, dimension] SOK_FLOAT32; absent: zeros
 *   gradients         out, laid out as the `sums` of combine_bags */
SOK_EXPORT int sok_spread_bags(const sok_context* context, int32_t num_tables, const sok_placement* tables,
                               int32_t num_lookups, const sok_lookup* lookups, const sok_tensor* output_gradients,
                               sok_tensor scales, sok_tensor gradients);

/* Copies targets[i] = sources[i], for messages that are put together from several arrays and taken apart again.
 *   sources, targets  host arrays of num_copies views of rank 1, pairwise of one dtype and size, not overlapping */
SOK_EXPORT int sok_copy(const sok_context* context, int32_t num_copies, const sok_tensor* sources,
                        const sok_tensor* targets);

#ifdef __cplusplus
}
#endif
#endif /* SOK_OWNER_POOLING_H_ */
