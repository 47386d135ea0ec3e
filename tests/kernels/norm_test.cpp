// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/bit_equality.h"
#include "kernels/exact_sum.h"

namespace spillway::test {
namespace {

using kernels::CpuKernels;
using kernels::kGrain;

/// The documented order: 32 partial sums, then halves added onto halves.
double grain_reference(std::span<const float> grain) {
  std::vector<double> partial(32, 0.0);
  for (std::size_t i = 0; i < grain.size(); ++i) {
    partial[i % 32] += static_cast<double>(grain[i]) * static_cast<double>(grain[i]);
  }
  for (std::size_t width = 16; width >= 1; width /= 2) {
    for (std::size_t j = 0; j < width; ++j) partial[j] += partial[j + width];
  }
  return partial[0];
}

std::vector<double> sums_reference(std::span<const float> values) {
  std::vector<double> sums;
  for (std::size_t start = 0; start < values.size(); start += kGrain) {
    sums.push_back(grain_reference(values.subspan(start, std::min<std::size_t>(kGrain, values.size() - start))));
  }
  return sums;
}

std::vector<double> sums_of(const CpuKernels& set, std::span<const float> values) {
  std::vector<double> sums((values.size() + kGrain - 1) / kGrain);
  set.grain_square_sums(sums.data(), values.data(), static_cast<std::int64_t>(values.size()));
  return sums;
}

double norm_of(const CpuKernels& set, std::span<const float> values) {
  kernels::ExactSum total;
  for (double sum : sums_of(set, values)) total.add(sum);
  return std::sqrt(total.value());
}

TEST(GrainSquareSums, EveryLengthAndAlignment) {
  const Problem problem = ordinary_problem(3 * kGrain + 40, 9);
  for (const CpuKernels* set : kernel_sets()) {
    for (std::size_t count = 0; count <= 3 * kGrain + 20; count += count < 300 ? 1 : 61) {
      const auto values = std::span<const float>(problem.g).subspan(count % 17, count);
      ASSERT_TRUE(same_bits(sums_of(*set, values), sums_reference(values))) << set->name << ", length " << count;
    }
  }
}

TEST(GrainSquareSums, LongArraysOfAnyFiniteMagnitude) {
  Problem problem = wild_problem(1'000'003, 10);
  for (float& value : problem.g) value = std::isfinite(value) ? value : 1.0f;
  for (const CpuKernels* set : kernel_sets()) {
    const auto sums = sums_of(*set, problem.g);
    EXPECT_TRUE(same_bits(sums, sums_reference(problem.g))) << set->name;
    EXPECT_TRUE(std::ranges::all_of(sums, [](double sum) { return std::isfinite(sum); })) << set->name;
  }
}

TEST(GrainSquareSums, OnlyTheGrainWithANonFiniteValueIsNotFinite) {
  const std::vector<float> clean(4 * kGrain, std::numeric_limits<float>::max());
  for (const CpuKernels* set : kernel_sets()) {
    for (float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                      std::numeric_limits<float>::quiet_NaN()}) {
      for (std::size_t place : {0, 1, 31, 32, 1023, 1024, 2047, 4095}) {
        auto values = clean;
        values[place] = bad;
        const auto sums = sums_of(*set, values);
        for (std::size_t i = 0; i < sums.size(); ++i) {
          EXPECT_EQ(std::isfinite(sums[i]), i != place / kGrain) << set->name << ", place " << place << ", grain " << i;
        }
      }
    }
  }
}

TEST(Norm, LargeAndSmallGradientsNeitherOverflowNorVanish) {
  for (const CpuKernels* set : kernel_sets()) {
    EXPECT_NEAR(norm_of(*set, std::vector<float>(10, 5000.0f)), 15811.388, 1e-3) << set->name;
    EXPECT_NEAR(norm_of(*set, std::vector<float>(10, 1e20f)) / 3.16227766e20, 1, 1e-7) << set->name;
    EXPECT_NEAR(norm_of(*set, std::vector<float>(10, 1e-30f)) / 3.16227766e-30, 1, 1e-7) << set->name;
  }
}

TEST(Norm, DoesNotDependOnTheOrderOfGrainsOrTheirGrouping) {
  const Problem problem = wild_problem(64 * kGrain, 11);
  for (const CpuKernels* set : kernel_sets()) {
    auto sums = sums_of(*set, problem.g);
    for (double& sum : sums) sum = std::isfinite(sum) ? sum : 0.1;
    kernels::ExactSum forward, first, second;
    for (double sum : sums) forward.add(sum);
    for (std::size_t i = sums.size(); i-- > 0;) (i % 3 == 0 ? first : second).add(sums[i]);
    second.add(first);
    EXPECT_EQ(forward.value(), second.value()) << set->name;
  }
}

}  // namespace
}  // namespace spillway::test
