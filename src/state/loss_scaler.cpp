// SPDX-License-Identifier: Apache-2.0
#include "spillway/state/loss_scaler.h"

#include <algorithm>

namespace spillway {

LossScaler::LossScaler(const LossScaleConfig& config)
    : dynamic_(true), config_(config), state_{config.initial, 0, config.hysteresis, 0} {}

void LossScaler::update(bool finite) {
  if (!dynamic_) return;
  if (finite) {
    state_.skips_at_minimum = 0;
    if (++state_.finite_steps < config_.growth_interval) return;
    state_.finite_steps = 0;
    state_.tolerance = config_.hysteresis;
    state_.scale *= config_.growth;
    return;
  }
  state_.finite_steps = 0;
  if (state_.scale <= config_.minimum) ++state_.skips_at_minimum;
  if (--state_.tolerance > 0) return;
  state_.tolerance = 1;  // once used up, each further step that is not finite backs off
  state_.scale = std::max(config_.minimum, state_.scale * config_.backoff);
}

}  // namespace spillway
