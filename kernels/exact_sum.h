// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace spillway::kernels {

/// An exact sum of doubles: a fixed-point accumulator of 64-bit limbs wide enough for every finite double, so that the
/// result depends on neither order nor grouping. Used for sums of squares, so values are not negative; negative ones
/// work too. Source of the idea: Kulisch's long accumulator.
class ExactSum {
 public:
  /// Adds `value`. Infinities and NaN set a flag instead.
  void add(double value);
  /// Adds another accumulator: the same as adding all its values.
  void add(const ExactSum& other);
  /// The sum rounded to nearest even once (0 is +0); NaN if a NaN or infinities of both signs were added, else an
  /// infinity if one was.
  double value() const;
  bool finite() const { return !nan_ && !positive_infinity_ && !negative_infinity_; }
  void clear() { *this = ExactSum(); }

 private:
  // Adds or takes away (high * 2^64 + low) << (64 * limb).
  void add_at(std::size_t limb, std::uint64_t low, std::uint64_t high);
  void subtract_at(std::size_t limb, std::uint64_t low, std::uint64_t high);

  // Two's complement, least significant limb first; bit 0 weighs 2^-1074. 2^1024 plus room for 2^63 additions.
  static constexpr int kLimbs = 36;
  std::array<std::uint64_t, kLimbs> limbs_{};
  bool nan_ = false, positive_infinity_ = false, negative_infinity_ = false;
};

}  // namespace spillway::kernels
