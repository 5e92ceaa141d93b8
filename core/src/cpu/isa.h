// SPDX-License-Identifier: Apache-2.0
#ifndef SOK_CPU_ISA_H_
#define SOK_CPU_ISA_H_

#include "cpu/kernels/kernels.h"

namespace sok::cpu {

// The kernels for this machine, chosen when the library is loaded. SOK_CPU_ISA=baseline|avx2|avx512 asks for less than
// the machine has; what it lacks is never chosen.
const Kernels& kernels();

}  // namespace sok::cpu

#endif  // SOK_CPU_ISA_H_
