// SPDX-License-Identifier: Apache-2.0
// CMake compiles this file once for each instruction set, with SOK_ISA its name. Everything but the table below is
// local to the object file.
#include "cpu/kernels/kernels.h"

#include "cpu/kernels/vector.h"
// Depends on vector.h.
#include "cpu/kernels/pool.h"
// Depend on pool.h.
#include "cpu/kernels/segments.h"

#include "cpu/kernels/optimizers.h"

#define SOK_STRING_OF(x) #x
#define SOK_STRING(x) SOK_STRING_OF(x)

namespace sok::cpu::SOK_ISA {

extern const Kernels kKernels = {
    SOK_STRING(SOK_ISA), find_outside, find_bad_split, pool,     weight_gradient,
    bag_scales,          sum_segments, update,         round_to,
};

}  // namespace sok::cpu::SOK_ISA
