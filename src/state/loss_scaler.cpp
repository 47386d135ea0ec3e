// SPDX-License-Identifier: Apache-2.0
#include "spillway/state/loss_scaler.h"

#include <algorithm>

namespace spillway {

LossScaler::LossScaler(const LossScaleConfig& config)
    : dynamic_(true), config_(config), scale_(config.initial), tolerance_(config.hysteresis) {}

void LossScaler::update(bool finite) {
  if (!dynamic_) return;
  if (finite) {
    skips_at_minimum_ = 0;
    if (++finite_steps_ < config_.growth_interval) return;
    finite_steps_ = 0;
    tolerance_ = config_.hysteresis;
    scale_ *= config_.growth;
    return;
  }
  finite_steps_ = 0;
  if (scale_ <= config_.minimum) ++skips_at_minimum_;
  if (--tolerance_ > 0) return;
  tolerance_ = 1;  // once used up, each further step that is not finite backs off
  scale_ = std::max(config_.minimum, scale_ * config_.backoff);
}

}  // namespace spillway
