// SPDX-License-Identifier: Apache-2.0
#include "lane/op_runner.h"
#include "spillway/lane/lane.h"

namespace spillway {
namespace {

class InlineComputeLane final : public ComputeLane {
 public:
  InlineComputeLane(double flops_rate, LaneContext context)
      : ComputeLane("compute"),
        flops_rate_(flops_rate),
        runner_(name(), {}, std::move(context)),
        last_mark_(Trace::now()) {}

  Ticket submit(Op op) override {
    TicketPromise promise;
    runner_.run(op, promise);
    return promise.ticket();
  }

  void wait(const Ticket& ticket) override { ticket.wait(); }

  Ticket mark(const char*, std::int64_t, double flops) override {
    if (flops_rate_ > 0) {
      const auto until = last_mark_ + static_cast<std::int64_t>(flops / flops_rate_ * 1e9);
      const std::int64_t now = Trace::now();
      if (until > now) std::this_thread::sleep_for(std::chrono::nanoseconds(until - now));
      last_mark_ = Trace::now();
    }
    return {};  // on this device, what was given before is done
  }

 private:
  const double flops_rate_;
  OpRunner runner_;
  std::int64_t last_mark_;
};

}  // namespace

std::unique_ptr<ComputeLane> make_inline_compute_lane(double flops_rate, LaneContext context) {
  return std::make_unique<InlineComputeLane>(flops_rate, std::move(context));
}

}  // namespace spillway
