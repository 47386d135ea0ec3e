// SPDX-License-Identifier: Apache-2.0
#include <exception>

#include "lane/op_runner.h"
#include "spillway/lane/stream_lane.h"

namespace spillway {
namespace {

class StreamComputeLane final : public ComputeLane {
 public:
  StreamComputeLane(CurrentStream current, EventPool& events, LaneContext context)
      : ComputeLane("compute"),
        current_(std::move(current)),
        events_(events),
        runner_(name(), {}, std::move(context), &events) {}

  Ticket submit(Op op) override {
    TicketPromise promise;
    runner_.run(op, promise, current_());
    return promise.ticket();
  }

  void wait(const Ticket& ticket) override { ticket.wait_in(current_()); }

  Ticket mark(const char*, std::int64_t, double) override {
    TicketPromise promise;
    try {
      promise.issue(events_.record(current_()));
    } catch (...) {  // of work given before: those who wait are told
      promise.fail(std::current_exception());
    }
    return promise.ticket();
  }

 private:
  const CurrentStream current_;
  EventPool& events_;
  OpRunner runner_;
};

}  // namespace

std::unique_ptr<ComputeLane> make_stream_compute_lane(CurrentStream current, EventPool& events, LaneContext context) {
  return std::make_unique<StreamComputeLane>(std::move(current), events, std::move(context));
}

}  // namespace spillway
