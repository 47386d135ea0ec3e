// SPDX-License-Identifier: Apache-2.0
#include "spillway/lane/ticket.h"

#include <condition_variable>
#include <mutex>
#include <utility>

namespace spillway {

struct Ticket::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool issued = false;
  // Written before `issued` and never again, so they are read without the lock after it.
  std::exception_ptr error;
  std::int64_t op = -1;
  Event event;

  void finish(std::exception_ptr with, Event at) {
    {
      const std::scoped_lock lock(mutex);
      error = std::move(with);
      event = std::move(at);
      issued = true;
    }
    changed.notify_all();
  }

  void wait_issued() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return issued; });
    if (error) std::rethrow_exception(error);
  }
};

bool Ticket::done() const {
  if (!state_) return true;
  {
    const std::scoped_lock lock(state_->mutex);
    if (!state_->issued) return false;
  }
  return state_->event.passed();
}

void Ticket::wait() const {
  if (!state_) return;
  state_->wait_issued();
  state_->event.wait();
}

void Ticket::wait_in(StreamRef stream) const {
  if (!state_) return;
  if (stream == StreamRef()) return wait();
  state_->wait_issued();
  state_->event.order_before(stream);
}

std::int64_t Ticket::op() const {
  return state_ ? state_->op : -1;
}

TicketPromise::TicketPromise() : state_(std::make_shared<Ticket::State>()) {}

TicketPromise::TicketPromise(std::int64_t op) : TicketPromise() {
  state_->op = op;
}

Ticket TicketPromise::ticket() const {
  Ticket ticket;
  ticket.state_ = state_;
  return ticket;
}

void TicketPromise::complete() {
  state_->finish(nullptr, {});
}

void TicketPromise::issue(Event event) {
  state_->finish(nullptr, std::move(event));
}

void TicketPromise::fail(std::exception_ptr error) {
  state_->finish(std::move(error), {});
}

}  // namespace spillway
