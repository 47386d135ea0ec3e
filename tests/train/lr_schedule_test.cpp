// SPDX-License-Identifier: Apache-2.0
#include "spillway/train/lr_schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

namespace spillway {
namespace {

using Kind = LrScheduleConfig::Kind;

TEST(LrSchedule, ConstantIsOneAfterWarmUp) {
  const LrScheduleConfig schedule{Kind::constant, 4, 0, 0};
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 0), 0.25);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 3), 1.0);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 4), 1.0);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 1000000), 1.0);
}

TEST(LrSchedule, LinearFallsToItsFinalFactorAndStays) {
  const LrScheduleConfig schedule{Kind::linear, 2, 12, 0.1};
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 2), 1.0);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 7), 0.55);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 12), 0.1);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 40), 0.1);
}

TEST(LrSchedule, CosineIsHalfWayInTheMiddle) {
  const LrScheduleConfig schedule{Kind::cosine, 0, 10, 0};
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 0), 1.0);
  EXPECT_NEAR(lr_factor(schedule, 5), 0.5, 1e-15);
  EXPECT_NEAR(lr_factor(schedule, 1), 0.5 * (1 + std::cos(std::numbers::pi / 10)), 1e-15);
  EXPECT_NEAR(lr_factor(schedule, 10), 0.0, 1e-15);
}

}  // namespace
}  // namespace spillway
