// SPDX-License-Identifier: Apache-2.0
// Figures that can be worked out by hand, so that kernels and reference cannot be wrong together.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/bit_equality.h"

namespace spillway::kernels {
namespace {

// Half a unit in the last place of `value`, with a little room for the rounding of doubles.
double half_ulp(float value) {
  return 0.50001 * (std::nextafter(std::fabs(value), std::numeric_limits<float>::infinity()) - std::fabs(value));
}

void expect_rounded(float actual, long double exact) {
  EXPECT_LE(std::fabs(static_cast<double>(actual - exact)), half_ulp(actual)) << static_cast<double>(exact);
}

TEST(AdamScalars, AreRoundedOnce) {
  const double lr = 3e-4, beta1 = 0.9, beta2 = 0.999, decay = 0.1;
  for (std::int64_t t : {1, 2, 3, 10, 1000, 1'000'000}) {
    const AdamScalars scalars = adam_scalars(lr, beta1, beta2, 1e-8, decay, true, t, 0.25f);
    expect_rounded(scalars.a, lr / (1 - std::pow(static_cast<long double>(beta1), t)));
    expect_rounded(scalars.s, 1 / std::sqrt(1 - std::pow(static_cast<long double>(beta2), t)));
    expect_rounded(scalars.k, 1 - static_cast<long double>(lr) * decay);
    expect_rounded(scalars.c1, 1 - static_cast<long double>(beta1));
    expect_rounded(scalars.c2, 1 - static_cast<long double>(beta2));
    EXPECT_EQ(scalars.grad_factor, 0.25f);
    EXPECT_EQ(scalars.l2, 0);
  }
  const AdamScalars coupled = adam_scalars(lr, beta1, beta2, 1e-8, decay, false, 1, 1);
  EXPECT_EQ(coupled.k, 1);
  EXPECT_EQ(coupled.l2, 0.1f);
}

TEST(Adam, TheFirstChangeIsTheRate) {
  for (const CpuKernels* set : test::kernel_sets()) {
    for (float gradient : {0.5f, -0.5f, 1e-3f, 1e4f}) {
      float p = 1, m = 0, v = 0;
      set->adam(adam_scalars(0.01, 0.9, 0.999, 1e-8, 0, true, 1, 1), &p, &m, &v, &gradient, Element::f32, nullptr,
                Element::none, 1);
      EXPECT_NEAR(p, 1 - std::copysign(0.01f, gradient), 1e-6) << set->name;
    }
  }
}

TEST(Adam, DecoupledDecayLeavesTheMomentsAlone) {
  for (const CpuKernels* set : test::kernel_sets()) {
    float p = 2, m = 0, v = 0;
    const float gradient = 0;
    set->adam(adam_scalars(0.1, 0.9, 0.999, 1e-8, 0.5, true, 1, 1), &p, &m, &v, &gradient, Element::f32, nullptr,
              Element::none, 1);
    EXPECT_EQ(p, 2 * 0.95f) << set->name;
    EXPECT_EQ(m, 0);
    EXPECT_EQ(v, 0);
    set->adam(adam_scalars(0.1, 0.9, 0.999, 1e-8, 0.5, false, 1, 1), &p, &m, &v, &gradient, Element::f32, nullptr,
              Element::none, 1);
    EXPECT_NEAR(m, 0.1 * 0.5 * 1.9, 1e-7) << set->name;
  }
}

TEST(Adam, TheFactorIsAppliedOnLoad) {
  for (const CpuKernels* set : test::kernel_sets()) {
    float p = 0, m = 0, v = 0;
    const float gradient = 3;
    set->adam(adam_scalars(0.1, 0.5, 0.75, 1e-8, 0, true, 1, 0.25f), &p, &m, &v, &gradient, Element::f32, nullptr,
              Element::none, 1);
    EXPECT_EQ(m, 0.5f * 0.75f) << set->name;
    EXPECT_EQ(v, 0.25f * 0.75f * 0.75f) << set->name;
  }
}

TEST(Adam, TheCopyIsTheUpdatedParameterRounded) {
  for (const CpuKernels* set : test::kernel_sets()) {
    float p = 1.00390625f, m = 0, v = 0;  // 1 + 2^-8: half way between two bf16 values; the even one is 1
    const float gradient = 0;
    std::uint16_t copy = 0;
    set->adam(adam_scalars(0.1, 0.9, 0.999, 1e-8, 0, true, 1, 1), &p, &m, &v, &gradient, Element::f32, &copy,
              Element::bf16, 1);
    EXPECT_EQ(copy, 0x3f80) << set->name;
  }
}

TEST(Sgd, MomentumStartsWithTheGradientAndIgnoresTheBuffer) {
  for (const CpuKernels* set : test::kernel_sets()) {
    float p = 1, b = std::numeric_limits<float>::quiet_NaN();
    const float gradient = 0.5f;
    set->sgd(sgd_scalars(0.25, 0.5, 0.75, 0, false, 1, 1), &p, &b, &gradient, Element::f32, nullptr, Element::none, 1);
    EXPECT_EQ(b, 0.5f) << set->name;
    EXPECT_EQ(p, 0.875f);
    set->sgd(sgd_scalars(0.25, 0.5, 0.75, 0, false, 2, 1), &p, &b, &gradient, Element::f32, nullptr, Element::none, 1);
    EXPECT_EQ(b, 0.375f) << set->name;
    EXPECT_EQ(p, 0.78125f);
    set->sgd(sgd_scalars(0.25, 0.5, 0, 0, true, 3, 1), &p, &b, &gradient, Element::f32, nullptr, Element::none, 1);
    EXPECT_EQ(b, 0.6875f) << set->name;
    EXPECT_EQ(p, 0.78125f - 0.25f * (0.5f + 0.5f * 0.6875f));
  }
}

TEST(Adagrad, TheRateDecaysWithTheStep) {
  for (const CpuKernels* set : test::kernel_sets()) {
    float p = 1, h = 0;
    const float gradient = 4;
    set->adagrad(adagrad_scalars(0.5, 0.5, 0, 0, 1, 1), &p, &h, &gradient, Element::f32, nullptr, Element::none, 1);
    EXPECT_EQ(h, 16) << set->name;
    EXPECT_EQ(p, 0.5f);
    const float second = 3;
    set->adagrad(adagrad_scalars(0.5, 0.5, 0, 0, 3, 1), &p, &h, &second, Element::f32, nullptr, Element::none, 1);
    EXPECT_EQ(h, 25) << set->name;
    EXPECT_EQ(p, 0.5f - 0.25f * (3.0f / 5.0f));
  }
}

TEST(Lion, MovesByTheRateOrNotAtAll) {
  for (const CpuKernels* set : test::kernel_sets()) {
    float p[] = {1, 1, 1}, m[] = {0, 0, 0};
    const float gradient[] = {1e-30f, -1e30f, 0};
    set->lion(lion_scalars(0.25, 0.9, 0.5, 0, 1), p, m, gradient, Element::f32, nullptr, Element::none, 3);
    EXPECT_EQ(p[0], 0.75f) << set->name;
    EXPECT_EQ(p[1], 1.25f);
    EXPECT_EQ(p[2], 1);
    EXPECT_EQ(m[1], -0.5e30f);
  }
}

}  // namespace
}  // namespace spillway::kernels
