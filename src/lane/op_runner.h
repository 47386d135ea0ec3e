// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <thread>
#include <unordered_map>

#include "spillway/lane/lane.h"

namespace spillway {

/// What all lanes that run ops on a thread share: waiting for tickets, delays of tests, the modelled link, the trace.
/// With `events`, ops are issued to streams. Threads: one at a time.
class OpRunner {
 public:
  OpRunner(const std::string& lane, LinkModel link, LaneContext context, EventPool* events = nullptr)
      : lane_(lane), link_(link), context_(std::move(context)), events_(events) {
    if (context_.trace != nullptr) track_ = context_.trace->track(lane);
  }

  /// Blocks: for the op's tickets, its body and its link time; on a stream, until it is issued. Completes, issues or
  /// fails `promise`, never throws.
  void run(Op& op, TicketPromise& promise, StreamRef stream = {}) {
    Event event;
    try {
      for (const Ticket& ticket : op.after) ticket.wait_in(stream);
      if (context_.delay) context_.delay(lane_, op);
      const std::int64_t begin = Trace::now();
      op.body(stream);
      if (events_ != nullptr) event = events_->record(stream);
      sleep_for_link(op, begin);
      if (context_.trace != nullptr) {
        const auto bytes = op.kind == OpKind::copy ? static_cast<std::int64_t>(op.amount) : 0;
        context_.trace->span(track_, label(op.name), begin, Trace::now(), bytes, op.index);
      }
      if (context_.delay) context_.delay(lane_, op);
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      promise.fail(error);
      if (context_.failed) context_.failed(error);
      return;
    }
    promise.issue(std::move(event));
  }

 private:
  void sleep_for_link(const Op& op, std::int64_t begin) const {
    if (op.kind != OpKind::copy) return;
    const double seconds = link_.latency.value + (link_.bandwidth > 0 ? op.amount / link_.bandwidth : 0);
    const auto until = begin + static_cast<std::int64_t>(seconds * 1e9);
    const std::int64_t now = Trace::now();
    if (until > now) std::this_thread::sleep_for(std::chrono::nanoseconds(until - now));
  }

  // Op names are literals, so their addresses identify them without a look-up by text.
  TraceLabel label(const char* name) {
    const auto found = labels_.find(name);
    if (found != labels_.end()) return found->second;
    return labels_.emplace(name, context_.trace->label(name)).first->second;
  }

  const std::string lane_;
  const LinkModel link_;
  const LaneContext context_;
  EventPool* const events_;
  TraceTrack track_;
  std::unordered_map<const char*, TraceLabel> labels_;
};

}  // namespace spillway
