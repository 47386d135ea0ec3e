// SPDX-License-Identifier: Apache-2.0
//
// A gradient that was scaled, with the inverse of the scale as the factor of the step, is the gradient itself: over a
// hundred steps of a moving scale, some of them skipped. Answers reports named in docs/field_reports.md.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/bit_equality.h"

namespace spillway::test {
namespace {

using kernels::CpuKernels;
using kernels::Element;

constexpr std::size_t kElements = 2100;

bool finite(const CpuKernels& set, std::span<const float> values) {
  std::vector<double> sums((values.size() + kernels::kGrain - 1) / kernels::kGrain);
  set.grain_square_sums(sums.data(), values.data(), static_cast<std::int64_t>(values.size()));
  return std::ranges::all_of(sums, [](double sum) { return std::isfinite(sum); });
}

/// A scale as a loss scaler moves it; the divisors 1, 8 and 65536 are among them.
float scale_of_step(int step) {
  constexpr float kScales[] = {1, 8, 65536, 32768, 16384, 0.5F, 1024};
  return kScales[step / 3 % 7];
}

Problem train(const Optimizer& optimizer, const CpuKernels& set, bool scaled) {
  Problem state = ordinary_problem(kElements, 5);
  std::ranges::fill(state.s0, 0.0F);
  std::ranges::fill(state.s1, 0.0F);
  std::int64_t update = 0;
  for (int step = 0; step < 100; ++step) {
    std::vector<float> g = state.g;
    std::rotate(g.begin(), g.begin() + step, g.end());
    const float scale = scaled ? scale_of_step(step) : 1.0F;
    for (float& value : g) value *= scale;
    if (step == 10) g[77] = std::numeric_limits<float>::infinity();
    if (step == 55) g[2099] = std::nanf("");
    if (!finite(set, g)) continue;
    optimizer.kernel(set, Hyper{}, ++update, 1 / scale, state.p.data(), state.s0.data(), state.s1.data(), g.data(),
                     Element::f32, nullptr, Element::none, kElements);
  }
  EXPECT_EQ(update, 98);
  return state;
}

TEST(GradientDivisor, IsTheSameAsDividingFirst) {
  for (const Optimizer& optimizer : optimizers()) {
    for (const CpuKernels* set : kernel_sets()) {
      const Problem expected = train(optimizer, *set, false), actual = train(optimizer, *set, true);
      EXPECT_TRUE(same_bits(actual.p, expected.p)) << optimizer.name << " " << set->name;
      EXPECT_TRUE(same_bits(actual.s0, expected.s0)) << optimizer.name << " " << set->name;
      EXPECT_TRUE(same_bits(actual.s1, expected.s1)) << optimizer.name << " " << set->name;
      EXPECT_FALSE(same_bits(actual.p, ordinary_problem(kElements, 5).p)) << optimizer.name << " trains";
    }
  }
}

}  // namespace
}  // namespace spillway::test
