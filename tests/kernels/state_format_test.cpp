// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/bit_equality.h"
#include "kernels/format_reference.h"

namespace spillway::test {
namespace {

using kernels::CpuKernels;
using kernels::Element;
using kernels::kBlock;
using kernels::StateFormat;
using kernels::StateKind;

constexpr StateKind kKinds[] = {StateKind::any_sign, StateKind::square};

std::vector<float> magnitudes_of(std::vector<float> values) {
  for (float& value : values) value = std::fabs(value);
  return values;
}

/// What the kernels make of `values`, and what they make of that.
PackedState pack_with(const CpuKernels& set, StateFormat format, StateKind kind, const std::vector<float>& values,
                      std::uint64_t seed = 1, std::int64_t step = 1, std::int64_t first = 0) {
  PackedState packed(format, kind, values.size());
  set.pack_state(packed.array(0), kind, values.data(), count_of(values), first, kernels::rounding_key(seed, step));
  return packed;
}

std::vector<float> unpack_with(const CpuKernels& set, PackedState packed, std::size_t count) {
  std::vector<float> values(count);
  set.unpack_state(values.data(), packed.array(0), packed.kind, count_of(values));
  return values;
}

// ---- split master --------------------------------------------------------------------------------

TEST(SplitMaster, IsExactAndItsWorkingCopyIsTheNearestWithTiesAwayFromZero) {
  std::vector<float> values = wild_problem(300'003, 20).p;
  const auto special = special_problem();
  values.insert(values.end(), special.g.begin(), special.g.begin() + 16);
  for (float tie : {0x1.01p0f, -0x1.01p0f, 0x1.03p0f, 0x1p-134f, -0x1p-134f, 0x1.fffffep127f}) values.push_back(tie);
  for (const CpuKernels* set : kernel_sets()) {
    std::vector<std::uint16_t> working(values.size()), low(values.size());
    std::vector<float> joined(values.size());
    set->split_master(working.data(), low.data(), values.data(), count_of(values));
    set->join_master(joined.data(), working.data(), low.data(), count_of(values));
    EXPECT_TRUE(same_bits(joined, values)) << set->name;
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_TRUE(
          same_bits(std::span(working).subspan(i, 1), std::vector{split_working_reference(values[i])}, Element::bf16))
          << set->name << ": " << values[i];
      ASSERT_EQ(low[i], split_low_reference(values[i])) << set->name;
    }
  }
}

TEST(SplitMaster, KnownValues) {
  const std::vector<float> values{0x1.01p0f, 0x1.00fffep0f, -0x1.01p0f};
  for (const CpuKernels* set : kernel_sets()) {
    std::vector<std::uint16_t> working(3), low(3);
    set->split_master(working.data(), low.data(), values.data(), 3);
    EXPECT_EQ(working, (std::vector<std::uint16_t>{0x3f81, 0x3f80, 0xbf81})) << set->name;
    EXPECT_EQ(low, (std::vector<std::uint16_t>{0x8000, 0x7fff, 0x8000})) << set->name;
  }
}

TEST(SplitMaster, ANanStaysOne) {
  for (const CpuKernels* set : kernel_sets()) {
    for (std::uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu, 0x7fc00000u}) {
      const float value = std::bit_cast<float>(bits);
      std::uint16_t working = 0, low = 0;
      float joined = 0;
      set->split_master(&working, &low, &value, 1);
      set->join_master(&joined, &working, &low, 1);
      EXPECT_TRUE(std::isnan(widen_reference(working, Element::bf16))) << set->name;
      EXPECT_TRUE(std::isnan(joined)) << set->name;
    }
  }
}

// ---- stochastic bf16 -----------------------------------------------------------------------------

TEST(StochasticBf16, EqualsTheReferenceFromAnyStart) {
  const auto values = wild_problem(5003, 21).g;
  for (std::int64_t first : {std::int64_t{0}, std::int64_t{1024}, (std::int64_t{5} << 32) - 1024}) {
    for (StateKind kind : kKinds) {
      PackedState expected(StateFormat::bf16, kind, values.size());
      expected.pack(values, 7, 11, static_cast<std::uint64_t>(first));
      for (const CpuKernels* set : kernel_sets()) {
        const PackedState packed = pack_with(*set, StateFormat::bf16, kind, values, 7, 11, first);
        EXPECT_TRUE(same_bits(packed.halves, expected.halves, Element::bf16)) << set->name << " from " << first;
        EXPECT_TRUE(same_bits(unpack_with(*set, packed, values.size()), expected.unpack())) << set->name;
      }
    }
  }
}

TEST(StochasticBf16, WhatBf16HoldsIsNotChanged) {
  std::vector<float> values;
  for (int half = 0; half < 65536; ++half) {
    values.push_back(widen_reference(static_cast<std::uint16_t>(half), Element::bf16));
  }
  for (const CpuKernels* set : kernel_sets()) {
    const PackedState packed = pack_with(*set, StateFormat::bf16, StateKind::any_sign, values);
    EXPECT_TRUE(same_bits(unpack_with(*set, packed, values.size()), values)) << set->name;
  }
}

// Counts of rounding up among n are binomial; five standard deviations.
TEST(StochasticBf16, RoundsUpAsOftenAsTheDistanceSays) {
  constexpr std::size_t kCount = 1 << 20;
  for (double share : {0.0625, 0.25, 0.5, 0.9}) {
    for (StateKind kind : kKinds) {
      for (std::int64_t step : {1, 2, 1000}) {
        const std::vector<float> values(kCount, static_cast<float>(1 + share * 0x1p-7));
        const PackedState packed = pack_with(kernels::cpu_kernels(), StateFormat::bf16, kind, values, 3, step);
        const double ups = static_cast<double>(std::ranges::count(packed.halves, 0x3f81));
        EXPECT_EQ(ups + static_cast<double>(std::ranges::count(packed.halves, 0x3f80)), kCount);
        EXPECT_NEAR(ups / kCount, share, 5 * std::sqrt(share * (1 - share) / kCount)) << "step " << step;
      }
    }
  }
}

/// Which of a million values half way between two were rounded up.
std::vector<bool> coins(StateKind kind, std::uint64_t seed, std::int64_t step, std::int64_t first) {
  const std::vector<float> values(1 << 20, 1 + 0x1p-8f);
  std::vector<bool> up;
  for (std::uint16_t half :
       pack_with(kernels::cpu_kernels(), StateFormat::bf16, kind, values, seed, step, first).halves) {
    up.push_back(half == 0x3f81);
  }
  return up;
}

TEST(StochasticBf16, NeighboursStepsSeedsStatesAndFarElementsAreIndependent) {
  const auto base = coins(StateKind::any_sign, 1, 1, 0);
  const auto agreement = [&](const std::vector<bool>& other, std::size_t shift) {
    std::size_t equal = 0;
    for (std::size_t i = 0; i < base.size(); ++i) equal += base[i] == other[(i + shift) % other.size()] ? 1 : 0;
    return static_cast<double>(equal) / static_cast<double>(base.size());
  };
  constexpr double kTolerance = 5 * 0.5 / 1024;
  for (std::size_t shift : {1, 2, 3, 8, 16, 256, 1024}) EXPECT_NEAR(agreement(base, shift), 0.5, kTolerance) << shift;
  EXPECT_NEAR(agreement(coins(StateKind::square, 1, 1, 0), 0), 0.5, kTolerance);
  EXPECT_NEAR(agreement(coins(StateKind::any_sign, 1, 2, 0), 0), 0.5, kTolerance);
  EXPECT_NEAR(agreement(coins(StateKind::any_sign, 2, 1, 0), 0), 0.5, kTolerance);
  EXPECT_NEAR(agreement(coins(StateKind::any_sign, 1, 1, std::int64_t{1} << 32), 0), 0.5, kTolerance);
}

// ---- 8-bit blocks --------------------------------------------------------------------------------

TEST(Block8, EqualsTheReference) {
  const auto ordinary = ordinary_problem(10 * kBlock + 37, 22);
  for (StateKind kind : kKinds) {
    const auto values = kind == StateKind::square ? ordinary.s1 : ordinary.g;
    PackedState expected(StateFormat::block8, kind, values.size());
    expected.pack(values, 0, 0, 0);
    for (const CpuKernels* set : kernel_sets()) {
      const PackedState packed = pack_with(*set, StateFormat::block8, kind, values);
      EXPECT_EQ(packed.codes, expected.codes) << set->name;
      EXPECT_TRUE(same_bits(packed.scales, expected.scales)) << set->name;
      EXPECT_TRUE(same_bits(unpack_with(*set, packed, values.size()), expected.unpack())) << set->name;
    }
  }
}

TEST(Block8, DecodesEveryCode) {
  for (StateKind kind : kKinds) {
    PackedState packed(StateFormat::block8, kind, 256);
    for (int code = 0; code < 256; ++code)
      packed.codes[static_cast<std::size_t>(code)] = static_cast<std::uint8_t>(code);
    packed.scales[0] = 1;
    std::vector<float> expected;
    for (std::uint8_t code : packed.codes) {
      const auto value = static_cast<float>(code_reference(code, kind));
      expected.push_back(kind == StateKind::square ? value * value : value);
    }
    for (const CpuKernels* set : kernel_sets()) {
      EXPECT_TRUE(same_bits(unpack_with(*set, packed, 256), expected)) << set->name;
    }
    const auto last = kind == StateKind::square ? expected.end() : expected.begin() + 128;
    EXPECT_TRUE(std::is_sorted(expected.begin(), last));
    EXPECT_EQ(*(last - 1), 1.0f);
  }
}

/// A block whose largest value is `scale`, the others spread over eight powers of ten below it.
std::vector<float> spread_block(float scale, unsigned seed) {
  std::vector<float> values = ordinary_problem(kBlock, seed).g;
  const float largest = std::fabs(*std::ranges::max_element(values, {}, [](float v) { return std::fabs(v); }));
  for (float& value : values) value = value / largest * scale;
  values[17] = scale;
  return values;
}

// The nearest code, up to the rounding of the position inside a level; below the smallest code everything is near.
TEST(Block8, TakesTheNearestCode) {
  for (float scale : {1.0f, 3e-5f, 7e20f}) {
    for (StateKind kind : kKinds) {
      const bool square = kind == StateKind::square;
      const auto values = square ? magnitudes_of(spread_block(scale, 23)) : spread_block(scale, 23);
      const PackedState packed = pack_with(kernels::cpu_kernels(), StateFormat::block8, kind, values);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double relative = square ? std::sqrt(values[i]) / packed.scales[0] : values[i] / packed.scales[0];
        double nearest = 2;
        for (int code = 0; code < 256; ++code) {
          nearest = std::min(nearest, std::fabs(code_reference(static_cast<std::uint8_t>(code), kind) - relative));
        }
        const double error = std::fabs(code_reference(packed.codes[i], kind) - relative);
        const double smallest = code_reference(1, kind);
        EXPECT_LE(error, std::max(nearest * (1 + 1e-5) + 1e-7 * std::fabs(relative), 0.57 * smallest)) << relative;
      }
      EXPECT_EQ(packed.codes[17], square ? 255 : 127) << "the largest is exact";
    }
  }
}

TEST(Block8, ZerosTinyBlocksAndNonFiniteValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const CpuKernels* set : kernel_sets()) {
    for (StateKind kind : kKinds) {
      const auto round_trip = [&](const std::vector<float>& values) {
        return unpack_with(*set, pack_with(*set, StateFormat::block8, kind, values), values.size());
      };
      EXPECT_EQ(round_trip(std::vector<float>(kBlock, 0.0f)), std::vector<float>(kBlock, 0.0f)) << set->name;
      const float tiny = kind == StateKind::square ? 0x1p-140f : 0x1p-149f;
      EXPECT_EQ(round_trip(std::vector<float>(3, tiny)), std::vector<float>(3, tiny)) << set->name;
      for (float bad : {infinity, std::numeric_limits<float>::quiet_NaN()}) {
        std::vector<float> values(2 * kBlock, 0.25f);
        values[300] = bad;
        const auto result = round_trip(values);
        EXPECT_EQ(result[0], 0.25f) << set->name;
        EXPECT_FALSE(std::isfinite(result[300])) << set->name;
      }
    }
  }
}

TEST(Block8, ASecondMomentAboveZeroNeverBecomesZero) {
  std::vector<float> values(kBlock, 1e-30f);
  values[0] = 1e10f;
  for (const CpuKernels* set : kernel_sets()) {
    const PackedState packed = pack_with(*set, StateFormat::block8, StateKind::square, values);
    EXPECT_GT(unpack_with(*set, packed, values.size())[1], 0) << set->name;
  }
}

}  // namespace
}  // namespace spillway::test
