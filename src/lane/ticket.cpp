// SPDX-License-Identifier: Apache-2.0
#include "spillway/lane/ticket.h"

#include <condition_variable>
#include <mutex>

namespace spillway {

struct Ticket::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr error;
  std::int64_t op = -1;

  void finish(std::exception_ptr with) {
    {
      const std::scoped_lock lock(mutex);
      done = true;
      error = std::move(with);
    }
    changed.notify_all();
  }
};

bool Ticket::done() const {
  if (!state_) return true;
  const std::scoped_lock lock(state_->mutex);
  return state_->done;
}

void Ticket::wait() const {
  if (!state_) return;
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->done; });
  if (state_->error) std::rethrow_exception(state_->error);
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
  state_->finish(nullptr);
}

void TicketPromise::fail(std::exception_ptr error) {
  state_->finish(std::move(error));
}

}  // namespace spillway
