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
#include "kernels/state_formats.h"

#if defined(__CUDACC__)
#define SPILLWAY_HD __host__ __device__ __forceinline__
#else
#define SPILLWAY_HD inline __attribute__((always_inline))
#endif

namespace spillway::kernels {
namespace {

SPILLWAY_HD constexpr std::uint32_t bits_of(float value) {
  return __builtin_bit_cast(std::uint32_t, value);
}

SPILLWAY_HD constexpr float float_of(std::uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

constexpr std::uint32_t kSignBit = 0x80000000u;
constexpr std::uint32_t kInfinity = 0x7f800000u;
constexpr std::uint32_t kQuietBit = 0x00400000u;

SPILLWAY_HD float root(float value) {
  return sqrtf(value);
}

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

// ---- small forms of masters and states ----------------------------------------------------------

/// fp32 as a bf16 working copy and 16 more bits, which count from -2^15 to 2^15 - 1 in units of fp32's last place: so
/// the working copy is the nearest bf16, ties away from zero. Exact for everything but NaN, whose low bits are dropped.
struct Split {
  static SPILLWAY_HD float join(std::uint16_t working, std::uint16_t low) {
    return float_of((std::uint32_t{working} << 16) + (std::uint32_t{low} ^ 0x8000u) - 0x8000u);
  }
  static SPILLWAY_HD std::uint32_t bits(float value) {
    const std::uint32_t plain = bits_of(value);
    return (plain & ~kSignBit) > kInfinity ? (plain | kQuietBit) & 0xffff0000u : plain;
  }
  static SPILLWAY_HD std::uint16_t working(float value) {
    return static_cast<std::uint16_t>((bits(value) + 0x8000u) >> 16);
  }
  static SPILLWAY_HD std::uint16_t low(float value) { return static_cast<std::uint16_t>(bits(value)); }
};

/// A mixer of 32 bits, one to one. Source: Appleby, the last step of MurmurHash3.
template <class Word>
SPILLWAY_HD Word mix(Word bits) {
  bits = (bits ^ (bits >> 16)) * 0x85ebca6bu;
  bits = (bits ^ (bits >> 13)) * 0xc2b2ae35u;
  return bits ^ (bits >> 16);
}

/// A mixer of 64 bits, one to one. Source: Stafford's thirteenth variant, the output function of SplitMix64.
SPILLWAY_HD constexpr std::uint64_t mix64(std::uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

/// The random words of a block: its elements' places, mixed between the two halves of the block's key, as in the cipher
/// of Even and Mansour 1997. Multiplications of 32 bits alone, which every instruction set has in its vectors.
struct BlockRandom {
  std::uint32_t before, after;

  static SPILLWAY_HD BlockRandom of(const RoundingKey& key, std::int64_t first) {
    const auto block = static_cast<std::uint64_t>(first / kBlock);
    const std::uint64_t bits = mix64(key.bits + block * 0x9e3779b97f4a7c15u);
    return {static_cast<std::uint32_t>(bits), static_cast<std::uint32_t>(bits >> 32)};
  }
  /// `place`: inside the block.
  template <class Word>
  SPILLWAY_HD Word word(Word place) const {
    return mix(place ^ before) ^ after;
  }
};

/// bf16, rounded to one of the two neighbours at random: up with the probability that makes the mean exact.
struct StochasticBf16 {
  /// `random`: 16 bits.
  static SPILLWAY_HD std::uint16_t narrow(float value, std::uint32_t random) {
    const std::uint32_t bits = bits_of(value);
    const bool nan = (bits & ~kSignBit) > kInfinity;
    return static_cast<std::uint16_t>((nan ? bits | kQuietBit : bits + random) >> 16);
  }
};

/// Codes of numbers in [0, 1] that are finer where the numbers are larger: 0, and kLevels levels, of which the e-th
/// from the top divides (8^-(e+1), 8^-e] into 2^(kLevels-1-e) equal steps. A code's highest bit tells its level; inside
/// a level numbers are a straight line over codes. Source of the idea: Dettmers et al. 2022, dynamic quantisation, with
/// powers of eight in place of ten.
template <int kLevels>
struct DynamicCode {
  static constexpr int kTop = kLevels - 1;

  static SPILLWAY_HD constexpr float power_of_two(int exponent) {
    return float_of(static_cast<std::uint32_t>(127 + exponent) << 23);
  }

  // The number of code c, of level l from the bottom: offset(l) + slope(l) * c, exact in fp32.
  static SPILLWAY_HD constexpr float offset(int l) {
    return power_of_two(3 * (l - kTop)) * (0.875f * power_of_two(-l) - 0.75f);
  }
  static SPILLWAY_HD constexpr float slope(int l) { return power_of_two(3 * (l - kTop) - l) * 0.875f; }

  static SPILLWAY_HD float decode(int code) {
    const int level = static_cast<int>(bits_of(static_cast<float>(code)) >> 23) - 127;
    return code == 0 ? 0.0f : offset(level) + slope(level) * static_cast<float>(code);
  }

  // The way back in level e from the top: start(e) + rise(e) * value, rounded to an integer.
  static SPILLWAY_HD constexpr float start(int e) { return power_of_two(kTop - e) * (6.0f / 7.0f) - 1; }
  static SPILLWAY_HD constexpr float rise(int e) { return power_of_two(kTop + 2 * e) * (8.0f / 7.0f); }

  static SPILLWAY_HD int encode(float value) {
    const float clean = value > 0 ? value : 0;                           // 0 for NaN, too
    const int below_one = 126 - static_cast<int>(bits_of(clean) >> 23);  // value >= 2^-(below_one + 1)
    const int exponent = below_one > 0 ? below_one : 0;
    const int third = exponent * 43 >> 7;  // exponent / 3
    const int level = third < kTop ? third : kTop;
    // Adding 2^23 rounds to an integer, to nearest even.
    return static_cast<int>(bits_of(clean * rise(level) + start(level) + 8388608.0f) & 0x3ffu);
  }
};

/// What brings a block's values into [0, 1]: (value * lift) * inverse. The lift keeps the inverse of the smallest
/// scales finite.
struct BlockFactor {
  float lift;
  float inverse;
  static SPILLWAY_HD BlockFactor of(float scale) {
    const float lift = scale < 0x1p-100f ? 0x1p64f : 1.0f;
    return {lift, 1 / (scale * lift)};
  }
};

/// The 8-bit form of a value, relative to its block's scale.
struct SignedBlock8 {
  static constexpr bool kSigned = true;
  using Code = DynamicCode<7>;
  static SPILLWAY_HD float scale(float largest) { return largest; }
  static SPILLWAY_HD std::uint8_t encode(float value, const BlockFactor& factor) {
    const int code = Code::encode(float_of(bits_of(value) & ~kSignBit) * factor.lift * factor.inverse);
    return static_cast<std::uint8_t>(code | static_cast<int>(bits_of(value) >> 24 & 0x80u));
  }
  static SPILLWAY_HD float decode(std::uint8_t byte, float scale) {
    const float magnitude = Code::decode(byte & 0x7f) * scale;
    return float_of(bits_of(magnitude) | (std::uint32_t{byte} & 0x80u) << 24);
  }
};

/// The same for values that are not negative, whose roots are coded: half the range in exponents, so twice as fine.
/// What is above zero never becomes zero, so that Adam cannot divide a remaining m by nothing.
struct SquareBlock8 {
  static constexpr bool kSigned = false;
  using Code = DynamicCode<8>;
  static SPILLWAY_HD float scale(float largest) { return root(largest); }
  static SPILLWAY_HD std::uint8_t encode(float value, const BlockFactor& factor) {
    const int code = Code::encode(root(value) * factor.lift * factor.inverse);
    const int smallest = value > 0 ? 1 : 0;
    return static_cast<std::uint8_t>(code > smallest ? code : smallest);
  }
  static SPILLWAY_HD float decode(std::uint8_t byte, float scale) {
    const float part = Code::decode(byte) * scale;
    return part * part;
  }
};

// ---- optimizers ---------------------------------------------------------------------------------
// update(scalars, p, g, states...): `g` already carries the gradient factor. kStates: how many, kKinds: of which kind.
// Scalars are those of scalars.h.
// Value is float, or a vector of them with the same operations.

/// Source: Kingma and Ba 2015, Algorithm 1; decoupled decay: Loshchilov and Hutter 2019, Algorithm 2.
struct Adam {
  static constexpr int kStates = 2;
  static constexpr StateKind kKinds[] = {StateKind::any_sign, StateKind::square};

  template <class Scalars, class Value>
  static SPILLWAY_HD void update(const Scalars& scalars, Value& p, Value g, Value& m, Value& v) {
    if (scalars.l2 != 0) g = g + scalars.l2 * p;
    m = scalars.beta1 * m + scalars.c1 * g;
    v = scalars.beta2 * v + (scalars.c2 * g) * g;
    const Value d = root(v) * scalars.s + scalars.eps;
    p = p * scalars.k - scalars.a * (m / d);
  }
};

/// Without momentum there is no state.
struct Sgd {
  static constexpr int kStates = 0;
  static constexpr StateKind kKinds[] = {StateKind::any_sign};

  template <class Scalars, class Value>
  static SPILLWAY_HD void update(const Scalars& scalars, Value& p, Value g) {
    if (scalars.l2 != 0) g = g + scalars.l2 * p;
    p = p - scalars.lr * g;
  }
};

/// Source: Sutskever et al. 2013, in PyTorch's form (the rate outside the buffer).
struct SgdMomentum {
  static constexpr int kStates = 1;
  static constexpr StateKind kKinds[] = {StateKind::any_sign};

  template <class Scalars, class Value>
  static SPILLWAY_HD void update(const Scalars& scalars, Value& p, Value g, Value& b) {
    if (scalars.l2 != 0) g = g + scalars.l2 * p;
    b = scalars.first ? g : scalars.mu * b + scalars.c * g;
    p = p - scalars.lr * (scalars.nesterov ? g + scalars.mu * b : b);
  }
};

/// Source: Duchi et al. 2011, the diagonal form.
struct Adagrad {
  static constexpr int kStates = 1;
  static constexpr StateKind kKinds[] = {StateKind::square};

  template <class Scalars, class Value>
  static SPILLWAY_HD void update(const Scalars& scalars, Value& p, Value g, Value& h) {
    if (scalars.l2 != 0) g = g + scalars.l2 * p;
    h = h + g * g;
    p = p - scalars.clr * (g / (root(h) + scalars.eps));
  }
};

SPILLWAY_HD float sign(float u) {
  return u > 0 ? 1.0f : u < 0 ? -1.0f : u == 0 ? 0.0f : u;
}

/// Source: Chen et al. 2023, Algorithm 2.
struct Lion {
  static constexpr int kStates = 1;
  static constexpr StateKind kKinds[] = {StateKind::any_sign};

  template <class Scalars, class Value>
  static SPILLWAY_HD void update(const Scalars& scalars, Value& p, Value g, Value& m) {
    const Value u = scalars.beta1 * m + scalars.c1 * g;
    p = p * scalars.k - scalars.lr * sign(u);
    m = scalars.beta2 * m + scalars.c2 * g;
  }
};

}  // namespace
}  // namespace spillway::kernels
