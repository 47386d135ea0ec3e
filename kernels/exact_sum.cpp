// SPDX-License-Identifier: Apache-2.0
#include "kernels/exact_sum.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace spillway::kernels {
namespace {

constexpr int kMantissaBits = 52;
constexpr std::uint64_t kMantissaMask = (std::uint64_t{1} << kMantissaBits) - 1;
constexpr int kSpecialExponent = 0x7ff;

/// A double as mantissa * 2^(shift - 1074).
struct Parts {
  bool negative;
  int exponent;
  std::uint64_t mantissa;
  int shift;
};

Parts split(double value) {
  std::uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const int exponent = static_cast<int>(bits >> kMantissaBits) & kSpecialExponent;
  const bool normal = exponent != 0;
  return {.negative = (bits >> 63) != 0,
          .exponent = exponent,
          .mantissa = (bits & kMantissaMask) | (std::uint64_t{normal} << kMantissaBits),
          .shift = normal ? exponent - 1 : 0};
}

template <std::size_t kCount>
void negate(std::array<std::uint64_t, kCount>& limbs) {
  bool carry = true;
  for (std::uint64_t& limb : limbs) {
    limb = ~limb + (carry ? 1 : 0);
    carry = carry && limb == 0;
  }
}

/// The 64 bits from bit `low` up.
template <std::size_t kCount>
std::uint64_t bits_from(const std::array<std::uint64_t, kCount>& limbs, int low) {
  const std::size_t limb = static_cast<std::size_t>(low) / 64;
  const int offset = low % 64;
  std::uint64_t bits = limbs[limb] >> offset;
  if (offset != 0 && limb + 1 < kCount) bits |= limbs[limb + 1] << (64 - offset);
  return bits;
}

template <std::size_t kCount>
bool any_below(const std::array<std::uint64_t, kCount>& limbs, int bit) {
  const std::size_t limb = static_cast<std::size_t>(bit) / 64;
  for (std::size_t i = 0; i < limb; ++i) {
    if (limbs[i] != 0) return true;
  }
  return (limbs[limb] & ((std::uint64_t{1} << (bit % 64)) - 1)) != 0;
}

template <std::size_t kCount>
int highest_bit(const std::array<std::uint64_t, kCount>& limbs) {
  for (int i = static_cast<int>(kCount) - 1; i >= 0; --i) {
    const std::uint64_t limb = limbs[static_cast<std::size_t>(i)];
    if (limb != 0) return i * 64 + 63 - __builtin_clzll(limb);
  }
  return -1;
}

/// A magnitude in units of 2^-1074, rounded to nearest even.
template <std::size_t kCount>
double round_once(const std::array<std::uint64_t, kCount>& limbs) {
  const int top = highest_bit(limbs);
  if (top <= kMantissaBits) return std::ldexp(static_cast<double>(limbs[0]), -1074);  // exact: denormal or just above
  const int low = top - kMantissaBits;
  std::uint64_t mantissa = bits_from(limbs, low) & ((kMantissaMask << 1) | 1);
  const bool half = (bits_from(limbs, low - 1) & 1) != 0;
  if (half && (any_below(limbs, low - 1) || (mantissa & 1) != 0)) ++mantissa;
  return std::ldexp(static_cast<double>(mantissa), low - 1074);  // infinity where it does not fit
}

}  // namespace

void ExactSum::add(double value) {
  const Parts parts = split(value);
  if (parts.exponent == kSpecialExponent) {
    nan_ = nan_ || (parts.mantissa & kMantissaMask) != 0;
    if ((parts.mantissa & kMantissaMask) == 0) (parts.negative ? negative_infinity_ : positive_infinity_) = true;
    return;
  }
  const std::size_t limb = static_cast<std::size_t>(parts.shift) / 64;
  const int offset = parts.shift % 64;
  const std::uint64_t low = parts.mantissa << offset;
  const std::uint64_t high = offset == 0 ? 0 : parts.mantissa >> (64 - offset);
  parts.negative ? subtract_at(limb, low, high) : add_at(limb, low, high);
}

void ExactSum::add_at(std::size_t limb, std::uint64_t low, std::uint64_t high) {
  bool carry = __builtin_add_overflow(limbs_[limb], low, &limbs_[limb]);
  // high < 2^53, so adding the carry to it cannot overflow.
  carry = __builtin_add_overflow(limbs_[limb + 1], high + (carry ? 1 : 0), &limbs_[limb + 1]);
  for (std::size_t i = limb + 2; carry && i < limbs_.size(); ++i) carry = ++limbs_[i] == 0;
}

void ExactSum::subtract_at(std::size_t limb, std::uint64_t low, std::uint64_t high) {
  bool borrow = __builtin_sub_overflow(limbs_[limb], low, &limbs_[limb]);
  borrow = __builtin_sub_overflow(limbs_[limb + 1], high + (borrow ? 1 : 0), &limbs_[limb + 1]);
  for (std::size_t i = limb + 2; borrow && i < limbs_.size(); ++i) borrow = limbs_[i]-- == 0;
}

void ExactSum::add(const ExactSum& other) {
  bool carry = false;
  for (std::size_t i = 0; i < limbs_.size(); ++i) {
    const bool first = __builtin_add_overflow(limbs_[i], other.limbs_[i], &limbs_[i]);
    const bool second = __builtin_add_overflow(limbs_[i], std::uint64_t{carry}, &limbs_[i]);
    carry = first || second;
  }
  nan_ = nan_ || other.nan_;
  positive_infinity_ = positive_infinity_ || other.positive_infinity_;
  negative_infinity_ = negative_infinity_ || other.negative_infinity_;
}

double ExactSum::value() const {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (nan_ || (positive_infinity_ && negative_infinity_)) return std::numeric_limits<double>::quiet_NaN();
  if (positive_infinity_ || negative_infinity_) return positive_infinity_ ? kInfinity : -kInfinity;
  if ((limbs_.back() >> 63) == 0) return round_once(limbs_);
  auto magnitude = limbs_;
  negate(magnitude);
  return -round_once(magnitude);
}

}  // namespace spillway::kernels
