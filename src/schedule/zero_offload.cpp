// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "runtime/shared_gradients.h"
#include "schedule/makers.h"

namespace spillway {
namespace {

/// Source: ZeRO-Offload (Ren et al., USENIX ATC 2021, arXiv 2101.06840), section 4.
///
/// Working parameters stay on the device; masters, optimizer states and accumulated gradients lie in pinned memory.
///
///   backward   LibTorch's gradient -> device slot -> (d2h) pinned slot -> (cpu) accumulated; a chunk leaves as soon as
///              its last gradient is there, while backward goes on
///              With several ranks each sums its shard first, on the device, and takes that down alone; or, where ranks
///              reduce in the last micro-batch only, accumulates by itself, brings its sums up chunk by chunk during
///              the last backward, and takes the sum of its shard down.
///   step       the norm of all gradients decides; then per chunk (cpu) update -> (h2d) working parameters, in the
///              order of the next forward, which starts as soon as its first blocks have arrived
///
/// Link traffic a step and trained parameter: one gradient down a micro-batch, one working parameter up. The paper sums
/// micro-batches on the device; here they are summed in fp32 on the host, which keeps the device free of gradients.
class ZeroOffload final : public Schedule {
 public:
  explicit ZeroOffload(Runtime& runtime) : runtime_(runtime) {
    if (!runtime.layout().partition().shared()) return;
    shared_ = std::make_unique<SharedGradients>(
        runtime,
        [this](std::span<const Segment* const> segments, Slot& sum, Ticket reduced) {
          take_sum(runtime_.kept_of(segments), sum, std::move(reduced));
        },
        SharedGradients::Own{
            [this](const Segment& segment, const Gradient& gradient) { take(segment, gradient, Sums::own); },
            [this](std::int64_t chunk) { send_if_open(chunk, Sums::own); }});
  }

  void begin_backward(bool last) override {
    last_ = last;
    if (shared_) shared_->begin(last);
  }

  void gradient_ready(const Gradient& gradient) override {
    if (shared_) return shared_->gradient_ready(gradient);
    for (const Segment& segment : runtime_.layout().parameter_segments(gradient.parameter))
      take(segment, gradient, Sums::step);
  }

  /// Chunks with a parameter that had no gradient this time are still open.
  void end_backward() override {
    if (shared_) shared_->end();
    while (!open_.empty()) send(open_.front().chunk, shared_ ? Sums::own : Sums::step);
  }

  void abandon_backward() noexcept override {
    open_.clear();
    if (shared_) shared_->abandon();
  }

  StepDecision step(const StepRequest& request) override {
    if (shared_) shared_->finish();
    const StepDecision decision = decide(runtime_.wait_norm(), request);
    if (!decision.finite) return decision;
    runtime_.begin_update();
    BucketedGather gather(runtime_);
    for (std::int64_t chunk = 0; chunk < static_cast<std::int64_t>(runtime_.layout().chunks().size()); ++chunk) {
      if (!runtime_.has_gradient_in_chunk(chunk)) continue;
      gather.add(chunk, runtime_.copy_up(chunk, runtime_.update(chunk, decision.scale)));
    }
    gather.flush();
    runtime_.end_update();
    return decision;
  }

 private:
  /// A chunk that collects gradients in a device slot.
  struct OpenChunk {
    std::int64_t chunk = 0;
    Slot* slot = nullptr;
    Ticket staged;
    std::vector<const Segment*> segments;
  };

  void take(const Segment& segment, const Gradient& gradient, Sums sums) {
    OpenChunk& open = open_chunk(segment, sums);
    open.staged = runtime_.stage(segment, gradient, *open.slot, open.staged);
    open.segments.push_back(&segment);
    if (open.segments.size() == runtime_.layout().chunk_segments(segment.chunk).size()) send(segment.chunk, sums);
  }

  OpenChunk& open_chunk(const Segment& segment, Sums sums) {
    const std::int64_t chunk = segment.chunk;
    const auto found =
        std::find_if(open_.begin(), open_.end(), [&](const OpenChunk& open) { return open.chunk == chunk; });
    if (found != open_.end()) {
      const std::vector<const Segment*>& has = found->segments;
      if (std::find(has.begin(), has.end(), &segment) == has.end()) return *found;
      // A parameter whose gradient comes in several parts (a nested backward): what is in the slot leaves before the
      // next part is staged, and the parts are added on the host.
      send(chunk, sums);
    }
    // Every slot may be collecting when gradients come in another order than parameters: then the chunk opened first
    // leaves with what it has, and its remaining gradients follow on their own.
    if (open_.size() == runtime_.device_slots().size()) send(open_.front().chunk, sums);
    Slot* slot = &next_free_slot();
    return open_.emplace_back(OpenChunk{chunk, slot, {}, {}});
  }

  /// The next slot in turn that no open chunk holds. Its former contents may still be on their way: stage() waits.
  Slot& next_free_slot() {
    while (true) {
      Slot& slot = runtime_.device_slots().next();
      if (std::none_of(open_.begin(), open_.end(), [&](const OpenChunk& open) { return open.slot == &slot; }))
        return slot;
    }
  }

  void send_if_open(std::int64_t chunk, Sums sums) {
    const auto is_it = [&](const OpenChunk& open) { return open.chunk == chunk; };
    if (std::any_of(open_.begin(), open_.end(), is_it)) send(chunk, sums);
  }

  void send(std::int64_t chunk, Sums sums) {
    const auto open = std::find_if(open_.begin(), open_.end(), [&](const OpenChunk& o) { return o.chunk == chunk; });
    Slot& pinned = runtime_.pinned_slots().next();
    const Ticket arrived = runtime_.copy_down(open->segments, *open->slot, pinned, open->staged, sums);
    static_cast<void>(runtime_.accumulate(open->segments, pinned, arrived, sums));
    // Overlaps with what is left of backward.
    if (last_ && sums == Sums::step) static_cast<void>(runtime_.norm(open->segments));
    open_.erase(open);
  }

  /// What this rank keeps of the ranks' sum goes down and is added to the accumulated gradients.
  void take_sum(const std::vector<const Segment*>& kept, Slot& sum, Ticket reduced) {
    if (kept.empty()) return;
    Slot& pinned = runtime_.pinned_slots().next();
    const Ticket arrived = runtime_.copy_down(kept, sum, pinned, std::move(reduced));
    static_cast<void>(runtime_.accumulate(kept, pinned, arrived));
    if (last_) static_cast<void>(runtime_.norm(kept));
  }

  Runtime& runtime_;
  std::unique_ptr<SharedGradients> shared_;  // where there are several ranks
  bool last_ = false;
  std::deque<OpenChunk> open_;  // in the order of opening
};

}  // namespace

std::unique_ptr<Schedule> make_zero_offload(Runtime& runtime) {
  return std::make_unique<ZeroOffload>(runtime);
}

}  // namespace spillway
