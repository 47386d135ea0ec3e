// SPDX-License-Identifier: Apache-2.0
#pragma once

// The arithmetic of one element, standing once for every processor: conversions between fp32 and the 16-bit types, and
// the body of each optimizer. Each operation is rounded to fp32 on its own, so every source that includes this file is
// compiled without contraction: -ffp-contract=off, and -fmad=false -prec-div=true -prec-sqrt=true -ftz=false for nvcc.
//
// Everything stands in an anonymous namespace: with external linkage the linker would keep one of the copies that the
// instruction sets' sources make, perhaps the AVX-512 one, and call it on every processor.

#include <math.h>  // ::sqrtf: the wrappers of <cmath> are inline functions of the kind just described
#include <string.h>

#include <cstdint>

#include "kernels/scalars.h"

#if defined(__CUDACC__)
#define SPILLWAY_HD __host__ __device__ __forceinline__
#else
#define SPILLWAY_HD inline __attribute__((always_inline))
#endif

namespace spillway::kernels {
namespace {

SPILLWAY_HD std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

SPILLWAY_HD float float_of(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

constexpr std::uint32_t kSignBit = 0x80000000u;
constexpr std::uint32_t kInfinity = 0x7f800000u;
constexpr std::uint32_t kQuietBit = 0x00400000u;

// ---- element types ------------------------------------------------------------------------------
// Each has what memory holds (Stored), widen (exact) and narrow (to nearest even). The choices between cases are
// written as selects of values computed for every element, which is what compilers turn into vector code.

struct F32 {
  using Stored = float;
  static SPILLWAY_HD float widen(float value) { return value; }
  static SPILLWAY_HD float narrow(float value) { return value; }
};

struct Bf16 {
  using Stored = std::uint16_t;

  static SPILLWAY_HD float widen(std::uint16_t value) { return float_of(std::uint32_t{value} << 16); }

  static SPILLWAY_HD std::uint16_t narrow(float value) {
    const std::uint32_t bits = bits_of(value);
    // Below half: stays. Above: the carry reaches bit 16. A tie carries only where bit 16 is odd.
    const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const bool nan = (bits & ~kSignBit) > kInfinity;
    return static_cast<std::uint16_t>((nan ? bits | kQuietBit : rounded) >> 16);
  }
};

struct F16 {
  using Stored = std::uint16_t;

  static SPILLWAY_HD float widen(std::uint16_t value) {
    const std::uint32_t sign = std::uint32_t{value & 0x8000u} << 16;
    const std::uint32_t shifted = std::uint32_t{value & 0x7fffu} << 13;
    const std::uint32_t normal = shifted + (112u << 23);
    // A denormal m * 2^-24 is read as 2^-14 + m * 2^-24, whose difference to 2^-14 is exact and normal in fp32.
    const std::uint32_t denormal = bits_of(float_of(shifted + (113u << 23)) - float_of(113u << 23));
    const std::uint32_t nan_or_infinity = shifted | kInfinity | (shifted > 0x0f800000u ? kQuietBit : 0u);
    const std::uint32_t finite = shifted < 0x00800000u ? denormal : normal;
    return float_of(sign | (shifted >= 0x0f800000u ? nan_or_infinity : finite));
  }

  static SPILLWAY_HD std::uint16_t narrow(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t magnitude = bits & ~kSignBit;
    // From 65520 on the carry makes infinity by itself.
    const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // In [0.5, 1) one unit in the last place is 2^-24, which is fp16's denormal step: the addition rounds to it.
    const std::uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    const std::uint32_t nan = 0x7e00u | (magnitude >> 13 & 0x3ffu);
    const std::uint32_t large = magnitude > kInfinity ? nan : 0x7c00u;
    const std::uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
    return static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | (magnitude >= 0x47800000u ? large : finite));
  }
};

// ---- optimizers ---------------------------------------------------------------------------------
// update(scalars, p, g, states...): `g` already carries the gradient factor.

/// Source: Kingma and Ba 2015, Algorithm 1; decoupled decay: Loshchilov and Hutter 2019, Algorithm 2.
struct Adam {
  static SPILLWAY_HD void update(const AdamScalars& scalars, float& p, float g, float& m, float& v) {
    if (scalars.l2 != 0) g = g + scalars.l2 * p;
    m = scalars.beta1 * m + scalars.c1 * g;
    v = scalars.beta2 * v + (scalars.c2 * g) * g;
    const float d = sqrtf(v) * scalars.s + scalars.eps;
    p = p * scalars.k - scalars.a * (m / d);
  }
};

/// Without momentum there is no state.
struct Sgd {
  static SPILLWAY_HD void update(const SgdScalars& scalars, float& p, float g) {
    if (scalars.l2 != 0) g = g + scalars.l2 * p;
    p = p - scalars.lr * g;
  }
};

/// Source: Sutskever et al. 2013, in PyTorch's form (the rate outside the buffer).
struct SgdMomentum {
  static SPILLWAY_HD void update(const SgdScalars& scalars, float& p, float g, float& b) {
    if (scalars.l2 != 0) g = g + scalars.l2 * p;
    b = scalars.first ? g : scalars.mu * b + scalars.c * g;
    p = p - scalars.lr * (scalars.nesterov ? g + scalars.mu * b : b);
  }
};

/// Source: Duchi et al. 2011, the diagonal form.
struct Adagrad {
  static SPILLWAY_HD void update(const AdagradScalars& scalars, float& p, float g, float& h) {
    if (scalars.l2 != 0) g = g + scalars.l2 * p;
    h = h + g * g;
    p = p - scalars.clr * (g / (sqrtf(h) + scalars.eps));
  }
};

/// Source: Chen et al. 2023, Algorithm 2.
struct Lion {
  static SPILLWAY_HD float sign(float u) { return u > 0 ? 1.0f : u < 0 ? -1.0f : u == 0 ? 0.0f : u; }

  static SPILLWAY_HD void update(const LionScalars& scalars, float& p, float g, float& m) {
    const float u = scalars.beta1 * m + scalars.c1 * g;
    p = p * scalars.k - scalars.lr * sign(u);
    m = scalars.beta2 * m + scalars.c2 * g;
  }
};

}  // namespace
}  // namespace spillway::kernels
