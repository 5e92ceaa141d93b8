/* SPDX-License-Identifier: Apache-2.0 */
/* The whole C interface of libsok_core. A lookup is a chain of stages, each a function of the same name:
 *
 *   route -> exchange -> locate -> gather_combine -> exchange -> combine      (forward)
 *   spread -> exchange -> reduce -> apply                                     (backward)
 *
 * One process alone runs locate (of tables that have an index) and gather_combine forward, and apply backward. Bags of
 * several keys may be pooled where the rows are instead (sok/messages.h). The exchange belongs to the caller;
 * sok/communicator.h offers one between GPUs. */
#ifndef SOK_SOK_H_
#define SOK_SOK_H_

#include "sok/batch_memory.h"
#include "sok/communicator.h"
#include "sok/context.h"
#include "sok/coordinates.h"
#include "sok/device.h"
#include "sok/dynamic_table.h"
#include "sok/error_record.h"
#include "sok/export.h"
#include "sok/gradient.h"
#include "sok/hash_index.h"
#include "sok/initialize.h"
#include "sok/lookup.h"
#include "sok/messages.h"
#include "sok/optimizer.h"
#include "sok/reserved_range.h"
#include "sok/status.h"
#include "sok/table.h"
#include "sok/types.h"
#include "sok/version.h"

#endif /* SOK_SOK_H_ */
