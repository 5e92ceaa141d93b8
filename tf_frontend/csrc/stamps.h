// SPDX-License-Identifier: Apache-2.0
// Which variable holds the stamps of a table's rows (../stamps.py). SokApply finds it here, by the table: as one more
// input of the op each table's stamps would cost whoever calls a tf.function two microseconds, tracked or not.
#ifndef SOK_TENSORFLOW_STAMPS_H_
#define SOK_TENSORFLOW_STAMPS_H_

#include "tables.h"

namespace sok::tf {

// From now on, until the table is destroyed, `stamps` says when its rows changed: an int64 variable [rows of the
// table], or [0] where nobody wants to know. It takes the place of what was there. Keeps `stamps` alive.
void TrackRows(Var* table, VarPtr stamps);

// The stamps of a table, or null when it is not tracked.
VarPtr StampsOf(const Var* table);

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_STAMPS_H_
