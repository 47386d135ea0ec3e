// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "spillway/runtime/runtime.h"

namespace spillway {

/// What a step is asked to do.
struct StepRequest {
  double grad_scale = 1;  // what turns accumulated into true gradients: W0 / (loss_scale x sum of weights)
  double clip_norm = 0;   // limit of the true gradients' norm; 0: none
};

/// What a step did.
struct StepDecision {
  bool finite = true;    // else nothing was changed
  double grad_norm = 0;  // of the true gradients, before clipping
  StepScale scale;       // applied on load: grad_scale x clip factor, rounded once
};

/// The decision every exact schedule makes, from the norm of all accumulated gradients.
/// Clip factor: min(1, limit / (norm + 1e-6)) in double, as PyTorch's clip_grad_norm_.
StepDecision decide(const GradientNorm& norm, const StepRequest& request);

/// Decides when and where each chunk moves and is updated, in the verbs of Runtime. Written once, for every machine:
/// nothing here polls a ticket, reads a clock, or knows what a device is.
///
/// Order: begin_backward, gradient_ready (once a parameter that has a gradient), end_backward; several times; then
/// step.
class Schedule {
 public:
  virtual ~Schedule() = default;

  /// `last`: no backward follows in this step, as far as is known; if one does, its gradients are added all the same.
  virtual void begin_backward(bool last) = 0;
  virtual void gradient_ready(const Gradient& gradient) = 0;
  virtual void end_backward() = 0;
  /// Blocks: until the gradients' norm is known; not for updates and uploads.
  virtual StepDecision step(const StepRequest& request) = 0;
  /// Forgets a backward that was cut short. Runtime::wait_discard_gradients follows.
  virtual void abandon_backward() noexcept = 0;
};

}  // namespace spillway
