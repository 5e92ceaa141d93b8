/* SPDX-License-Identifier: Apache-2.0 */
/* Which rows of a dynamic table (sok/dynamic_table.h) the running step uses: for who gives up rows in its place. */
#ifndef SOK_RUNNING_STEP_H_
#define SOK_RUNNING_STEP_H_

#include <stdint.h>

#include "sok/dynamic_table.h"
#include "sok/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The last generation before the running step. A row whose last use, the lower half of its score
 * (sok_dynamic_table_scores), is later is used by the step: once it is erased, the step's gradient is refused. 0 where
 * there are no scores, and for NULL. sok_apply, sok_dynamic_table_end_step and sok_dynamic_table_set_scores end a
 * step. */
SOK_EXPORT int64_t sok_dynamic_table_running_since(const sok_dynamic_table* table);

#ifdef __cplusplus
}
#endif
#endif /* SOK_RUNNING_STEP_H_ */
