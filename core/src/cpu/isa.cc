// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa.h"

#include <cstdlib>
#include <cstring>

namespace sok::cpu {
namespace {

const Kernels& choose() noexcept {
#ifdef SOK_X86_KERNELS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  const char* wanted = std::getenv("SOK_CPU_ISA");
  const auto at_most = [&](const char* name) { return wanted != nullptr && std::strcmp(wanted, name) == 0; };
  if (avx512 && !at_most("avx2") && !at_most("baseline")) return avx512::kKernels;
  if (avx2 && !at_most("baseline")) return avx2::kKernels;
#endif
  return baseline::kKernels;
}

// A constant from here on; made before anybody can call in.
const Kernels& chosen = choose();

}  // namespace

const Kernels& kernels() { return chosen; }

}  // namespace sok::cpu
