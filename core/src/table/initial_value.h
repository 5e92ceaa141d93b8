// SPDX-License-Identifier: Apache-2.0
// The initial value of a row: Philox4x32-10 and the distributions over it, the same to the last bit on every device.
//
// Only +, -, *, / and square roots of doubles are used, which IEEE 754 rounds alike everywhere, in the order written
// here and never fused (g++ -ffp-contract=off, nvcc --fmad=false): a logarithm of its own, and for the normal
// distribution the inverse of its distribution function by rational approximation (algorithm AS 241 of Wichura 1988,
// relative error 1e-16), one 32-bit draw a value. The result is rounded to float once.
#ifndef SOK_TABLE_INITIAL_VALUE_H_
#define SOK_TABLE_INITIAL_VALUE_H_

#include <cmath>
#include <cstdint>
#include <limits>

#include "common/host_device.h"
#include "sok/initialize.h"

#ifndef __CUDACC__
#include <cstring>
#endif

namespace sok {

struct Draw {
  uint32_t word[4];
};

// Philox4x32-10 of Salmon et al. 2011.
SOK_HOST_DEVICE inline Draw philox(uint64_t seed, uint32_t c0, uint32_t c1, uint64_t c23) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  Draw c = {{c0, c1, static_cast<uint32_t>(c23), static_cast<uint32_t>(c23 >> 32)}};
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c.word[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c.word[2];
    c = {{static_cast<uint32_t>(p1 >> 32) ^ c.word[1] ^ key0, static_cast<uint32_t>(p1),
          static_cast<uint32_t>(p0 >> 32) ^ c.word[3] ^ key1, static_cast<uint32_t>(p0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// log(x) of a normal positive x: exponent and mantissa in [sqrt(1/2), sqrt(2)), then the series of atanh.
SOK_HOST_DEVICE inline double natural_log(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof(bits));
  int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
  bits = (bits & 0xFFFFFFFFFFFFFull) | 0x3FF0000000000000ull;
  double mantissa;
  memcpy(&mantissa, &bits, sizeof(mantissa));
  if (mantissa > 1.4142135623730951) {
    mantissa *= 0.5;
    exponent += 1;
  }
  const double f = (mantissa - 1.0) / (mantissa + 1.0);
  const double f2 = f * f;
  double series = 1.0 / 23.0;
  for (int i = 21; i >= 1; i -= 2) series = series * f2 + 1.0 / i;
  return static_cast<double>(exponent) * 0.6931471805599453 + 2.0 * f * series;
}

// The x below which a standard normal variable is with probability p, 0 < p < 1.
SOK_HOST_DEVICE inline double normal_quantile(double p) {
  const double q = p - 0.5;
  if (q >= -0.425 && q <= 0.425) {
    const double r = 0.180625 - q * q;
    return q *
           (((((((2509.0809287301226727 * r + 33430.575583588128105) * r + 67265.770927008700853) * r +
                45921.953931549871457) *
                   r +
               13731.693765509461125) *
                  r +
              1971.5909503065514427) *
                 r +
             133.14166789178437745) *
                r +
            3.387132872796366608) /
           (((((((5226.495278852854561 * r + 28729.085735721942674) * r + 39307.89580009271061) * r +
                21213.794301586595867) *
                   r +
               5394.1960214247511077) *
                  r +
              687.1870074920579083) *
                 r +
             42.313330701600911252) *
                r +
            1.0);
  }
  double r = sqrt(-natural_log(q < 0.0 ? p : 1.0 - p));
  double x;
  if (r <= 5.0) {
    r -= 1.6;
    x = (((((((7.7454501427834140764e-4 * r + 0.0227238449892691845833) * r + 0.24178072517745061177) * r +
             1.27045825245236838258) *
                r +
            3.64784832476320460504) *
               r +
           5.7694972214606914055) *
              r +
          4.6303378461565452959) *
             r +
         1.42343711074968357734) /
        (((((((1.05075007164441684324e-9 * r + 5.475938084995344946e-4) * r + 0.0151986665636164571966) * r +
             0.14810397642748007459) *
                r +
            0.68976733498510000455) *
               r +
           1.6763848301838038494) *
              r +
          2.05319162663775882187) *
             r +
         1.0);
  } else {
    r -= 5.0;
    x = (((((((2.01033439929228813265e-7 * r + 2.71155556874348757815e-5) * r + 0.0012426609473880784386) * r +
             0.026532189526576123093) *
                r +
            0.29656057182850489123) *
               r +
           1.7848265399172913358) *
              r +
          5.4637849111641143699) *
             r +
         6.6579046435011037772) /
        (((((((2.04426310338993978564e-15 * r + 1.4215117583164458887e-7) * r + 1.8463183175100546818e-5) * r +
             7.868691311456132591e-4) *
                r +
            0.0148753612908506148525) *
               r +
           0.13692988092273580531) *
              r +
          0.59983220655588793769) *
             r +
         1.0);
  }
  return q < 0.0 ? -x : x;
}

class InitialValue {
 public:
  explicit InitialValue(const sok_initializer& initializer)
      : kind_(initializer.kind), seed_(initializer.seed), a_(initializer.a), b_(initializer.b) {
    step_ = (b_ - a_) * 0x1p-32;
    most_ = static_cast<float>(b_);
    if (a_ < b_ && static_cast<double>(most_) >= b_)
      most_ = std::nextafter(most_, -std::numeric_limits<float>::infinity());
  }

  bool is_normal() const { return kind_ == SOK_NORMAL || kind_ == SOK_TRUNCATED_NORMAL; }

  // Columns 4 * block .. 4 * block + 3 of the row of `key`. Without kNormal, only where it is not is_normal: a kernel
  // takes fewer registers then.
  template <bool kNormal>
  SOK_HOST_DEVICE void columns(uint64_t key, uint32_t block, float* values) const {
    if (kind_ == SOK_CONSTANT) {
      for (int c = 0; c < 4; ++c) values[c] = static_cast<float>(a_);
      return;
    }
    const Draw draw = philox(seed_, block, 0, key);
    if (!kNormal || kind_ == SOK_UNIFORM) {
      for (int c = 0; c < 4; ++c) values[c] = uniform(draw.word[c]);
      return;
    }
    if constexpr (kNormal) {
#ifdef __CUDACC__
#pragma unroll
#endif
      for (int c = 0; c < 4; ++c) {
        double z = standard_normal(draw.word[c]);
        if (kind_ == SOK_TRUNCATED_NORMAL) {
          for (uint32_t again = 1; z < -2.0 || z > 2.0; ++again) {
            // One draw in 22 lies outside; that 32 in a row do happens once in 10^43 values.
            z = again < 32 ? standard_normal(philox(seed_, block, again, key).word[c]) : 0.0;
          }
        }
        values[c] = static_cast<float>(a_ + b_ * z);
      }
    }
  }

 private:
  static SOK_HOST_DEVICE double standard_normal(uint32_t word) {
    return normal_quantile((to_double(word) + 0.5) * 0x1p-32);
  }

  // The interval is half-open in float too: what would round up to b is the float below it.
  SOK_HOST_DEVICE float uniform(uint32_t word) const {
    const float value = static_cast<float>(a_ + step_ * to_double(word));
    return value < most_ ? value : most_;
  }

  // Exact. A GPU converts a quarter as many numbers in a time as it adds.
  static SOK_HOST_DEVICE double to_double(uint32_t word) {
#ifdef __CUDA_ARCH__
    return __hiloint2double(0x43300000, static_cast<int>(word)) - 0x1p52;
#else
    return static_cast<double>(word);
#endif
  }

  int32_t kind_;
  uint64_t seed_;
  double a_, b_;
  // Of uniform values: what a draw counts, and the largest value.
  double step_;
  float most_;
};

}  // namespace sok

#endif  // SOK_TABLE_INITIAL_VALUE_H_
