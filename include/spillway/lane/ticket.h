// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <memory>

namespace spillway {

/// The completion of an op: a value to be copied, waited on by other ops and by the host.
///
/// A ticket also carries its op's error; an op that starts after a failed ticket does not run and fails with the same
/// error. A default-made ticket is done.
/// Threads: safe.
class Ticket {
 public:
  Ticket() = default;

  /// For tests and progress only: what a schedule submits must not depend on time.
  bool done() const;
  /// Blocks: until the op has run. Throws: the op's error.
  void wait() const;
  /// The op's number in the OpGraph of the virtual lane that recorded it; below zero: none.
  std::int64_t op() const;

 private:
  friend class TicketPromise;
  struct State;
  std::shared_ptr<State> state_;
};

/// The lane's end of a ticket. Completed or failed exactly once.
class TicketPromise {
 public:
  TicketPromise();
  /// Of the op with this number in an OpGraph.
  explicit TicketPromise(std::int64_t op);
  Ticket ticket() const;
  void complete();
  void fail(std::exception_ptr error);

 private:
  std::shared_ptr<Ticket::State> state_;
};

}  // namespace spillway
