// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <memory>

#include "spillway/device/event.h"

namespace spillway {

/// The completion of an op: a value to be copied, waited on by other ops and by the host.
///
/// An op of a stream is complete in two steps: issued, when an event in the order of its stream stands for it, and
/// done, when the device has come past that event. For every other op the two are one.
///
/// A ticket also carries its op's error; an op that starts after a failed ticket does not run and fails with the same
/// error. What goes wrong on the device after an op was issued is thrown by wait(). A default-made ticket is done.
/// Owns: its event, which goes back to its pool when the last copy of the ticket dies. Threads: safe.
class Ticket {
 public:
  Ticket() = default;

  /// For tests and progress only: what a schedule submits must not depend on time.
  bool done() const;
  /// Blocks: until the op has run. Throws: the op's error.
  void wait() const;
  /// The op's number in the OpGraph of the virtual lane that recorded it; below zero: none.
  std::int64_t op() const;
  /// What is given to `stream` after this call runs after the op; with an empty stream as wait().
  /// Blocks: until the op is issued. Throws: the op's error as far as it is known by then.
  void wait_in(StreamRef stream) const;

 private:
  friend class TicketPromise;
  struct State;
  std::shared_ptr<State> state_;
};

/// The lane's end of a ticket. Completed, issued or failed exactly once.
class TicketPromise {
 public:
  TicketPromise();
  /// Of the op with this number in an OpGraph.
  explicit TicketPromise(std::int64_t op);
  Ticket ticket() const;
  void complete();
  /// The op is done when the device has come past `event`.
  void issue(Event event);
  void fail(std::exception_ptr error);

 private:
  std::shared_ptr<Ticket::State> state_;
};

}  // namespace spillway
