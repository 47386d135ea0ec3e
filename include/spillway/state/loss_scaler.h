// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "spillway/core/config.h"

namespace spillway {

/// Where a loss scaler stands.
struct LossScalerState {
  double scale = 1;
  std::int64_t finite_steps = 0, tolerance = 0, skips_at_minimum = 0;
  bool operator==(const LossScalerState&) const = default;
};

/// The factor on the loss that keeps small fp16 gradients from vanishing, moved by what each step found.
class LossScaler {
 public:
  /// `config` as Config::validate accepts it.
  explicit LossScaler(const LossScaleConfig& config);
  /// A scale of 1 that never moves: fp32 and bf16.
  LossScaler() = default;

  bool dynamic() const { return dynamic_; }
  double scale() const { return state_.scale; }
  const LossScalerState& state() const { return state_; }
  /// Goes on from there. Without effect on a scale that never moves.
  void set_state(const LossScalerState& state) {
    if (dynamic_) state_ = state;
  }
  /// After a step: whether its gradients were finite.
  void update(bool finite);
  /// Whether so many steps in a row were skipped at the smallest scale that going on is pointless.
  bool exhausted() const { return dynamic_ && state_.skips_at_minimum >= config_.most_skips_at_minimum; }

 private:
  bool dynamic_ = false;
  LossScaleConfig config_;
  LossScalerState state_;
};

}  // namespace spillway
