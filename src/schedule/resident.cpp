// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <vector>

#include "runtime/shared_gradients.h"
#include "schedule/makers.h"

namespace spillway {
namespace {

/// Nothing moves: gradients, masters and optimizer states stay on the device. The reference for every other schedule.
class Resident final : public Schedule {
 public:
  explicit Resident(Runtime& runtime) : runtime_(runtime) {
    if (!runtime.layout().partition().shared()) return;
    shared_ = std::make_unique<SharedGradients>(
        runtime,
        [this](std::span<const Segment* const> segments, Slot& sum, Ticket reduced) {
          const auto kept = runtime_.kept_of(segments);
          if (!kept.empty()) static_cast<void>(runtime_.accumulate_sum(kept, sum, std::move(reduced)));
        },
        SharedGradients::Own{[this](const Segment& segment, const Gradient& gradient) {
                               static_cast<void>(runtime_.accumulate(segment, gradient, Sums::own));
                             },
                             [](std::int64_t) {}});
  }

  void begin_backward(bool last) override {
    if (shared_) shared_->begin(last);
  }
  void end_backward() override {
    if (shared_) shared_->end();
  }
  void abandon_backward() noexcept override {
    if (shared_) shared_->abandon();
  }

  void gradient_ready(const Gradient& gradient) override {
    if (shared_) return shared_->gradient_ready(gradient);
    for (const Segment& segment : runtime_.layout().parameter_segments(gradient.parameter)) {
      static_cast<void>(runtime_.accumulate(segment, gradient));
    }
  }

  StepDecision step(const StepRequest& request) override {
    if (shared_) shared_->finish();
    const StepDecision decision = decide(runtime_.wait_norm(), request);
    if (!decision.finite) return decision;
    runtime_.begin_update();
    BucketedGather gather(runtime_);
    for (std::int64_t chunk = 0; chunk < static_cast<std::int64_t>(runtime_.layout().chunks().size()); ++chunk) {
      if (runtime_.has_gradient_in_chunk(chunk)) gather.add(chunk, runtime_.update(chunk, decision.scale));
    }
    gather.flush();
    runtime_.end_update();
    return decision;
  }

 private:
  Runtime& runtime_;
  std::unique_ptr<SharedGradients> shared_;  // where there are several ranks
};

}  // namespace

std::unique_ptr<Schedule> make_resident(Runtime& runtime) {
  return std::make_unique<Resident>(runtime);
}

}  // namespace spillway
