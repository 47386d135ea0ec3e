// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/reference.h"

namespace spillway::test {

/// Equal bits, or both NaN. The message names the first element that differs.
testing::AssertionResult same_bits(std::span<const float> actual, std::span<const float> expected);
testing::AssertionResult same_bits(std::span<const double> actual, std::span<const double> expected);
testing::AssertionResult same_bits(std::span<const std::uint16_t> actual, std::span<const std::uint16_t> expected,
                                   kernels::Element type);

inline std::int64_t count_of(const auto& values) {
  return static_cast<std::int64_t>(values.size());
}

/// Values as memory of one element type holds them, and what they are worth.
struct Typed {
  kernels::Element type = kernels::Element::none;
  std::vector<float> wide;          // the values, rounded to the type
  std::vector<std::uint16_t> half;  // their 16 bits; empty where the type is f32
  const void* data() const { return half.empty() ? static_cast<const void*>(wide.data()) : half.data(); }
  const void* at(std::size_t i) const { return half.empty() ? static_cast<const void*>(&wide[i]) : &half[i]; }
};
Typed round_to(kernels::Element type, std::span<const float> values);

/// What an update reads and writes.
struct Problem {
  std::vector<float> p, s0, s1, g;
  std::size_t size() const { return p.size(); }
};

/// Values as in training: parameters about 1, gradients over eight powers of ten, second moments not negative.
Problem ordinary_problem(std::size_t count, unsigned seed);
/// Any bits at all: every magnitude, denormals, infinities, NaN.
Problem wild_problem(std::size_t count, unsigned seed);
/// Every combination of 16 special values in p, s0, s1 and g.
Problem special_problem();

/// What an update must leave, by the reference: the problem's arrays and the copy.
struct UpdateOutcome {
  std::vector<float> p, s0, s1;
  Typed copy;
};
UpdateOutcome expected_update(const Optimizer& optimizer, const Problem& problem, const Typed& gradients,
                              kernels::Element copy_type, std::int64_t step, float factor);

/// The kernel sets that run here.
std::vector<const kernels::CpuKernels*> kernel_sets();

inline constexpr kernels::Element kGradientTypes[] = {kernels::Element::f32, kernels::Element::bf16,
                                                      kernels::Element::f16};
inline constexpr kernels::Element kCopyTypes[] = {kernels::Element::none, kernels::Element::f32, kernels::Element::bf16,
                                                  kernels::Element::f16};

}  // namespace spillway::test
