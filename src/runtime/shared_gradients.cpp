// SPDX-License-Identifier: Apache-2.0
#include "runtime/shared_gradients.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "spillway/core/error.h"

namespace spillway {

SharedGradients::SharedGradients(Runtime& runtime, Reduced reduced, Own own)
    : runtime_(runtime),
      reduced_(std::move(reduced)),
      own_(std::move(own)),
      turn_(runtime.layout().parameters().size()),
      to_come_(runtime.layout().chunks().size()) {}

void SharedGradients::begin(bool last) {
  if (runtime_.ranks_added()) {
    throw StateError(
        "a backward after the one that was said to be the step's last: with reduce_last_only the ranks have added "
        "their gradients by then");
  }
  following_ = last || !runtime_.reduces_last();
  if (following_) follow(runtime_.gradient_order());
}

void SharedGradients::follow(std::vector<std::int64_t> order) {
  order_ = std::move(order);
  std::fill(turn_.begin(), turn_.end(), -1);
  std::fill(to_come_.begin(), to_come_.end(), 0);
  for (std::size_t i = 0; i < order_.size(); ++i) {
    turn_[static_cast<std::size_t>(order_[i])] = static_cast<std::int64_t>(i);
    for (const Segment& segment : runtime_.layout().parameter_segments(order_[i]))
      ++to_come_[static_cast<std::size_t>(segment.chunk)];
  }
  next_ = 0;
}

void SharedGradients::abandon() noexcept {
  following_ = false;
  open_.clear();
  bucket_.clear();
  reduced_later_.clear();
}

void SharedGradients::gradient_ready(const Gradient& gradient) {
  if (!following_) {
    for (const Segment& segment : runtime_.layout().parameter_segments(gradient.parameter)) own_.add(segment, gradient);
    return;
  }
  const std::int64_t turn = turn_[static_cast<std::size_t>(gradient.parameter)];
  if (turn < static_cast<std::int64_t>(next_)) {
    throw StateError(
        fmt::format("a gradient of {} came {}: with several ranks the gradients of a backward come once each, in an "
                    "order that ranks "
                    "do not contradict, as they do where every rank runs the same blocks in the same order",
                    runtime_.layout().parameters()[static_cast<std::size_t>(gradient.parameter)].name,
                    turn < 0 ? "that was not expected" : "late, or a second time"));
  }
  while (static_cast<std::int64_t>(next_) < turn) take(order_[next_], nullptr);
  take(gradient.parameter, &gradient);
}

void SharedGradients::take(std::int64_t parameter, const Gradient* gradient) {
  ++next_;
  for (const Segment& segment : runtime_.layout().parameter_segments(parameter)) {
    Open& open = opened(segment.chunk);
    if (runtime_.reduces_last()) {
      if (gradient != nullptr) own_.add(segment, *gradient);
    } else if (gradient != nullptr) {
      open.staged = runtime_.stage(segment, *gradient, *open.slot, open.staged);
    } else {
      open.missing.push_back(&segment);
    }
    open.segments.push_back(&segment);
    if (--to_come_[static_cast<std::size_t>(segment.chunk)] > 0) continue;
    const auto at = std::find_if(open_.begin(), open_.end(), [&](const Open& o) { return o.chunk == segment.chunk; });
    send(static_cast<std::size_t>(at - open_.begin()));
  }
}

SharedGradients::Open& SharedGradients::opened(std::int64_t chunk) {
  const auto found = std::find_if(open_.begin(), open_.end(), [&](const Open& open) { return open.chunk == chunk; });
  if (found != open_.end()) return *found;
  if (runtime_.reduces_last()) return open_.emplace_back(Open{chunk, nullptr, {}, {}, {}});
  if (open_.size() + bucket_.size() == runtime_.device_slots().size()) {
    if (bucket_.empty()) send(0);
    flush();
  }
  return open_.emplace_back(Open{chunk, &free_slot(), {}, {}, {}});
}

/// The next slot in turn that nothing stands in. Its former contents may still be on their way: stage() waits.
Slot& SharedGradients::free_slot() {
  while (true) {
    Slot& slot = runtime_.device_slots().next();
    const bool open = std::any_of(open_.begin(), open_.end(), [&](const Open& o) { return o.slot == &slot; });
    const bool waits =
        std::any_of(bucket_.begin(), bucket_.end(), [&](const Reduction& r) { return r.staged == &slot; });
    if (!open && !waits) return slot;
  }
}

void SharedGradients::send(std::size_t index) {
  Open open = std::move(open_[index]);
  open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(index));
  if (runtime_.reduces_last()) {
    own_.complete(open.chunk);
    const Runtime::Offer offer = runtime_.offer(open.segments);
    open.slot = offer.slot;
    open.staged = offer.ready;
  }
  if (!open.missing.empty()) open.staged = runtime_.stage_zeros(open.missing, *open.slot, open.staged);
  bucket_.push_back({open.chunk, std::move(open.segments), open.slot, nullptr, open.staged});
  if (static_cast<std::int64_t>(bucket_.size()) >= runtime_.store().spec().bucket_chunks) flush();
}

void SharedGradients::flush() {
  if (bucket_.empty()) return;
  if (runtime_.reduces_last()) hand_on(runtime_.reduce_slots().size() - bucket_.size());
  for (Reduction& reduction : bucket_) reduction.sum = &runtime_.reduce_slots().next();
  const Ticket reduced = runtime_.reduce(bucket_);
  for (Reduction& reduction : bucket_) {
    reduction.ready = reduced;
    reduced_later_.push_back(std::move(reduction));
  }
  bucket_.clear();
  if (!runtime_.reduces_last()) hand_on(0);
}

void SharedGradients::hand_on(std::size_t most) {
  while (reduced_later_.size() > most) {
    const Reduction oldest = std::move(reduced_later_.front());
    reduced_later_.pop_front();
    reduced_(oldest.segments, *oldest.sum, oldest.ready);
  }
}

void SharedGradients::end() {
  if (!following_) return;
  while (next_ < order_.size()) take(order_[next_], nullptr);
  flush();
  hand_on(0);
  following_ = false;
  if (runtime_.reduces_last()) runtime_.note_ranks_added();
}

void SharedGradients::finish() {
  if (!runtime_.reduces_last() || runtime_.ranks_added()) return;
  following_ = true;
  follow(runtime_.with_earlier_gradients({}));
  end();
}

void BucketedGather::add(std::int64_t chunk, Ticket updated) {
  chunks_.push_back(chunk);
  updated_.push_back(std::move(updated));
  if (static_cast<std::int64_t>(chunks_.size()) >= runtime_.store().spec().bucket_chunks) flush();
}

void BucketedGather::flush() {
  if (!chunks_.empty()) runtime_.gather(chunks_, std::move(updated_));
  chunks_.clear();
  updated_.clear();
}

}  // namespace spillway
