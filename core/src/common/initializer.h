// SPDX-License-Identifier: Apache-2.0
#ifndef SOK_COMMON_INITIALIZER_H_
#define SOK_COMMON_INITIALIZER_H_

#include <cmath>

#include "common/status.h"
#include "sok/initialize.h"

namespace sok {

// Throws Error.
inline void check_initializer(const sok_initializer& initializer) {
  const auto [struct_size, kind, reserved, seed, a, b] = initializer;
  SOK_CHECK(struct_size == sizeof(sok_initializer), "initializer.struct_size is ", struct_size, ", must be ",
            sizeof(sok_initializer));
  SOK_CHECK(kind >= SOK_CONSTANT && kind <= SOK_TRUNCATED_NORMAL, "initializer.kind is ", kind,
            ", which is none of sok_initializer_kind");
  if (kind != SOK_CONSTANT) {
    SOK_CHECK(std::isfinite(a) && std::isfinite(b), "initializer: a and b must be finite");
  }
  SOK_CHECK(kind != SOK_UNIFORM || a <= b, "initializer: the range [", a, ", ", b, ") is empty");
  SOK_CHECK((kind != SOK_NORMAL && kind != SOK_TRUNCATED_NORMAL) || b >= 0, "initializer: the standard deviation is ",
            b, ", must not be negative");
}

}  // namespace sok

#endif  // SOK_COMMON_INITIALIZER_H_
