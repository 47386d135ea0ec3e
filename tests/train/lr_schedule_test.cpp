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

TEST(LrSchedule, LogarithmicWarmUpRisesFastAtFirst) {
  LrScheduleConfig schedule;
  schedule.warmup = LrScheduleConfig::Warmup::logarithmic;
  schedule.warmup_steps = 100;
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 0), 0.0);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 9), 0.5);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 99), 1.0);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 100), 1.0);
  schedule.warmup_start = 0.2;
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 0), 0.2);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 9), 0.6);
  schedule.warmup_steps = 1;
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 0), 0.2);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 1), 1.0);
}

TEST(LrSchedule, WarmUpStartsWhereItIsTold) {
  LrScheduleConfig schedule;
  schedule.warmup_steps = 4;
  schedule.warmup_start = 0.5;
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 0), 0.625);
  EXPECT_DOUBLE_EQ(lr_factor(schedule, 3), 1.0);
}

}  // namespace
}  // namespace spillway
