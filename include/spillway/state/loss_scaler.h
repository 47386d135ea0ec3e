// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "spillway/core/config.h"

namespace spillway {

/// The factor on the loss that keeps small fp16 gradients from vanishing, moved by what each step found.
class LossScaler {
 public:
  /// `config` as Config::validate accepts it.
  explicit LossScaler(const LossScaleConfig& config);
  /// A scale of 1 that never moves: fp32 and bf16.
  LossScaler() = default;

  bool dynamic() const { return dynamic_; }
  double scale() const { return scale_; }
  /// After a step: whether its gradients were finite.
  void update(bool finite);
  /// Whether so many steps in a row were skipped at the smallest scale that going on is pointless.
  bool exhausted() const { return dynamic_ && skips_at_minimum_ >= config_.most_skips_at_minimum; }

 private:
  bool dynamic_ = false;
  LossScaleConfig config_;
  double scale_ = 1;
  std::int64_t finite_steps_ = 0, tolerance_ = 0, skips_at_minimum_ = 0;
};

}  // namespace spillway
