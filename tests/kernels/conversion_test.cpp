// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/bit_equality.h"

namespace spillway::test {
namespace {

using kernels::CpuKernels;
using kernels::Element;

constexpr Element kHalfTypes[] = {Element::bf16, Element::f16};

std::vector<std::uint16_t> all_halves() {
  std::vector<std::uint16_t> halves(65536);
  std::iota(halves.begin(), halves.end(), std::uint16_t{0});
  return halves;
}

/// All values of `type`, the midpoints between neighbours, what lies next to both, and random bits.
std::vector<float> rounding_cases(Element type) {
  std::vector<float> values;
  for (std::uint16_t half : all_halves()) {
    const float value = widen_reference(half, type);
    const float next = widen_reference(static_cast<std::uint16_t>(half + 1), type);
    for (float centre : {value, value + (next - value) / 2}) {
      values.insert(values.end(), {centre, std::nextafter(centre, 0.0f), std::nextafter(centre, 2 * centre)});
    }
  }
  std::mt19937 generator(5);
  for (int i = 0; i < 1'000'000; ++i) values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(generator())));
  return values;
}

TEST(Widen, EveryHalfValue) {
  const auto halves = all_halves();
  for (Element type : kHalfTypes) {
    std::vector<float> expected;
    for (std::uint16_t half : halves) expected.push_back(widen_reference(half, type));
    for (const CpuKernels* set : kernel_sets()) {
      std::vector<float> actual(halves.size());
      set->widen(actual.data(), halves.data(), type, count_of(actual));
      EXPECT_TRUE(same_bits(actual, expected)) << set->name;
    }
  }
}

TEST(Narrow, EveryBoundaryAndRandomBits) {
  for (Element type : kHalfTypes) {
    const auto values = rounding_cases(type);
    const Typed expected = round_to(type, values);
    for (const CpuKernels* set : kernel_sets()) {
      std::vector<std::uint16_t> actual(values.size());
      set->narrow(actual.data(), type, values.data(), count_of(values));
      EXPECT_TRUE(same_bits(actual, expected.half, type)) << set->name;
    }
  }
}

TEST(Narrow, KnownValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> values{1.0f,        -2.0f, 65504.0f, 65519.99f,   65520.0f,   -65520.0f,
                                  infinity,    0.0f,  -0.0f,    0x1p-24f,    0x1.8p-24f, 0x1p-25f,
                                  0x1.02p-25f, 1e5f,  -1e30f,   0x1.ffcp-15f};
  const std::vector<std::uint16_t> expected{0x3c00, 0xc000, 0x7bff, 0x7bff, 0x7c00, 0xfc00, 0x7c00, 0x0000,
                                            0x8000, 0x0001, 0x0002, 0x0000, 0x0001, 0x7c00, 0xfc00, 0x0400};
  for (const CpuKernels* set : kernel_sets()) {
    std::vector<std::uint16_t> actual(values.size());
    set->narrow(actual.data(), Element::f16, values.data(), count_of(values));
    EXPECT_EQ(actual, expected) << set->name;
    const std::vector<float> ties{0x1.01p0f, 0x1.03p0f, -0x1.01p0f, std::numeric_limits<float>::max(), 0x1p-134f};
    std::vector<std::uint16_t> rounded(ties.size());
    set->narrow(rounded.data(), Element::bf16, ties.data(), count_of(ties));
    EXPECT_EQ(rounded, (std::vector<std::uint16_t>{0x3f80, 0x3f82, 0xbf80, 0x7f80, 0x0000})) << set->name;
  }
}

// A NaN whose payload lies in the low bits alone must not become an infinity; the sign stays, the quiet bit is set.
TEST(Narrow, NanStaysNan) {
  const std::vector<float> values{std::bit_cast<float>(0x7f800001u), std::bit_cast<float>(0xff800001u),
                                  std::bit_cast<float>(0x7fffffffu), std::bit_cast<float>(0xffffffffu)};
  for (const CpuKernels* set : kernel_sets()) {
    std::vector<std::uint16_t> actual(values.size());
    set->narrow(actual.data(), Element::bf16, values.data(), count_of(values));
    EXPECT_EQ(actual, (std::vector<std::uint16_t>{0x7fc0, 0xffc0, 0x7fff, 0xffff})) << set->name;
    set->narrow(actual.data(), Element::f16, values.data(), count_of(values));
    EXPECT_EQ(actual, (std::vector<std::uint16_t>{0x7e00, 0xfe00, 0x7fff, 0xffff})) << set->name;
  }
}

TEST(Narrow, AnyLengthAndAlignment) {
  const Problem problem = ordinary_problem(300, 6);
  for (Element type : kHalfTypes) {
    const Typed expected = round_to(type, problem.g);
    for (const CpuKernels* set : kernel_sets()) {
      for (std::size_t count = 0; count <= 257; ++count) {
        const std::size_t offset = count % 17;
        std::vector<std::uint16_t> half(320, 0xabcd);
        set->narrow(&half[offset], type, &problem.g[offset + 1], static_cast<std::int64_t>(count));
        std::vector<float> wide(320, 7.0f);
        set->widen(&wide[offset + 2], &half[offset], type, static_cast<std::int64_t>(count));
        for (std::size_t i = 0; i < count; ++i) {
          ASSERT_EQ(half[offset + i], expected.half[offset + 1 + i]) << set->name << " " << count;
          ASSERT_EQ(wide[offset + 2 + i], expected.wide[offset + 1 + i]) << set->name << " " << count;
        }
        ASSERT_EQ(half[offset + count], 0xabcd);
        ASSERT_EQ(wide[offset + 2 + count], 7.0f);
      }
    }
  }
}

TEST(Accumulate, AddsInFp32OfEveryType) {
  const Problem problem = wild_problem(100'003, 7);
  for (Element type : kGradientTypes) {
    const Typed source = round_to(type, problem.g);
    std::vector<float> expected = problem.p;
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = expected[i] + source.wide[i];
    for (const CpuKernels* set : kernel_sets()) {
      std::vector<float> actual = problem.p;
      set->accumulate(actual.data() + 1, source.at(1), type, count_of(actual) - 1);
      set->accumulate(actual.data(), source.at(0), type, 1);
      EXPECT_TRUE(same_bits(actual, expected)) << set->name;
    }
  }
}

TEST(Convert, Fp32IsACopy) {
  const Problem problem = wild_problem(1000, 8);
  for (const CpuKernels* set : kernel_sets()) {
    std::vector<float> widened(1000), narrowed(1000);
    set->widen(widened.data(), problem.g.data(), Element::f32, 1000);
    set->narrow(narrowed.data(), Element::f32, problem.g.data(), 1000);
    EXPECT_TRUE(same_bits(widened, problem.g)) << set->name;
    EXPECT_TRUE(same_bits(narrowed, problem.g)) << set->name;
  }
}

}  // namespace
}  // namespace spillway::test
