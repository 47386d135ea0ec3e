// SPDX-License-Identifier: Apache-2.0
#include "spillway/train/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace spillway {

namespace {

double warmup_share(const LrScheduleConfig& schedule, std::int64_t update) {
  const auto done = static_cast<double>(update + 1);
  const auto steps = static_cast<double>(schedule.warmup_steps);
  if (schedule.warmup == LrScheduleConfig::Warmup::linear) return done / steps;
  return std::log(done) / std::log(std::max(steps, 2.0));  // of one step, too, the logarithm divides
}

}  // namespace

double lr_factor(const LrScheduleConfig& schedule, std::int64_t update) {
  if (update < schedule.warmup_steps) {
    return schedule.warmup_start + (1.0 - schedule.warmup_start) * warmup_share(schedule, update);
  }
  using Kind = LrScheduleConfig::Kind;
  if (schedule.kind == Kind::constant) return 1.0;
  const auto length = static_cast<double>(std::max<std::int64_t>(schedule.total_steps - schedule.warmup_steps, 1));
  const double done = std::min(1.0, static_cast<double>(update - schedule.warmup_steps) / length);
  const double falling = schedule.kind == Kind::linear ? 1.0 - done : 0.5 * (1.0 + std::cos(std::numbers::pi * done));
  return schedule.final_factor + (1.0 - schedule.final_factor) * falling;
}

}  // namespace spillway
