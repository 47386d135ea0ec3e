// SPDX-License-Identifier: Apache-2.0
#include "schedule/makers.h"

namespace spillway {
namespace {

/// Nothing moves: gradients, masters and optimizer states stay on the device. The reference for every other schedule.
class Resident final : public Schedule {
 public:
  explicit Resident(Runtime& runtime) : runtime_(runtime) {}

  void begin_backward(bool) override {}
  void end_backward() override {}
  void abandon_backward() noexcept override {}

  void gradient_ready(const Gradient& gradient) override {
    for (const Segment& segment : runtime_.layout().parameter_segments(gradient.parameter)) {
      static_cast<void>(runtime_.accumulate(segment, gradient));
    }
  }

  StepDecision step(const StepRequest& request) override {
    const StepDecision decision = decide(runtime_.wait_norm(), request);
    if (!decision.finite) return decision;
    runtime_.begin_update();
    for (std::int64_t chunk = 0; chunk < static_cast<std::int64_t>(runtime_.layout().chunks().size()); ++chunk) {
      if (runtime_.has_gradient_in_chunk(chunk)) static_cast<void>(runtime_.update(chunk, decision.scale));
    }
    runtime_.end_update();
    return decision;
  }

 private:
  Runtime& runtime_;
};

}  // namespace

std::unique_ptr<Schedule> make_resident(Runtime& runtime) {
  return std::make_unique<Resident>(runtime);
}

}  // namespace spillway
