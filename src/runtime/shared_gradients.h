// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <vector>

#include "spillway/runtime/runtime.h"

namespace spillway {

/// Where several ranks train: collects each chunk's gradients in a device slot and has them summed over the ranks,
/// bucket by bucket, while backward goes on. Where ranks reduce in the last micro-batch only, each adds up its own
/// gradients before, and what leaves are these sums.
///
/// Order: all ranks go through the parameters of Runtime::gradient_order() one after another, whether they have a
/// gradient of it or not; a missing one counts as zeros. What leaves when follows from that order and the number of
/// slots alone, so it is the same on every rank. A chunk leaves when the last parameter of the order that is in it has
/// come, or, with what it has, when all slots are in use.
class SharedGradients {
 public:
  /// `reduced`: what is to be done with the sum of some of a chunk's segments.
  using Reduced = std::function<void(std::span<const Segment* const> segments, Slot& sum, Ticket reduced)>;
  /// How a rank adds up gradients by itself: `add` takes a part of one, `complete` says that no more of a chunk comes.
  struct Own {
    std::function<void(const Segment& segment, const Gradient& gradient)> add;
    std::function<void(std::int64_t chunk)> complete;
  };
  SharedGradients(Runtime& runtime, Reduced reduced, Own own);

  /// Throws: StateError where ranks have reduced in the last micro-batch, which this would follow.
  void begin(bool last);
  /// Throws: StateError for a gradient whose turn is over, or that is not in the order.
  void gradient_ready(const Gradient& gradient);
  void end();
  /// Before the step: has the sums reduced that no backward was the last for. What had a gradient is agreed on.
  void finish();
  void abandon() noexcept;

 private:
  struct Open {
    std::int64_t chunk = 0;
    Slot* slot = nullptr;  // and what it holds; none for own sums
    Ticket staged;
    std::vector<const Segment*> segments, missing;  // missing ones are among the segments
  };

  void follow(std::vector<std::int64_t> order);
  /// The next parameter of the order. `gradient` null: this rank has no gradient of it.
  void take(std::int64_t parameter, const Gradient* gradient);
  Open& opened(std::int64_t chunk);
  Slot& free_slot();
  void send(std::size_t open);
  void flush();
  /// Gives the oldest sums on, until at most `most` wait.
  void hand_on(std::size_t most);

  Runtime& runtime_;
  const Reduced reduced_;
  const Own own_;
  bool following_ = false;  // an order; else gradients are added up by this rank alone
  std::vector<std::int64_t> order_;
  std::vector<std::int64_t> turn_;     // a parameter's place in the order; below zero: none
  std::vector<std::int64_t> to_come_;  // segments of each chunk that have not come yet
  std::size_t next_ = 0;               // in the order
  std::deque<Open> open_;              // in the order of opening
  std::vector<Reduction> bucket_;
  /// Reductions that are under way, `ready` being the sum's ticket. What follows one of own sums is given to in-order
  /// lanes which the next own sums pass through too: it comes later, or each bucket would wait for the other ranks'
  /// part of the one before.
  std::deque<Reduction> reduced_later_;
};

/// Has updated chunks brought together, a bucket at a time. Does nothing where no state is cut.
class BucketedGather {
 public:
  explicit BucketedGather(Runtime& runtime) : runtime_(runtime) {}
  void add(std::int64_t chunk, Ticket updated);
  void flush();

 private:
  Runtime& runtime_;
  std::vector<std::int64_t> chunks_;
  std::vector<Ticket> updated_;
};

}  // namespace spillway
