// SPDX-License-Identifier: Apache-2.0
#include "spillway/plan/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "spillway/core/error.h"
#include "spillway/core/trace.h"

namespace spillway {
namespace {

void check_cost(const CostModel& cost) {
  for (double rate : {cost.upload_bandwidth, cost.download_bandwidth, cost.latency.value, cost.compute_rate,
                      cost.cpu_update_rate, cost.device_update_rate, cost.cpu_bytes_rate, cost.device_bytes_rate}) {
    require(std::isfinite(rate) && rate >= 0,
            fmt::format("a cost model's rates and latency must be finite and not negative; one is {}", rate));
  }
}

double time_at(double amount, double rate) {
  return rate > 0 ? amount / rate : 0;
}

double seconds_of(const RecordedOp& op, const std::string& lane, const CostModel& cost) {
  const bool cpu = lane == "cpu";
  switch (op.kind) {
    case OpKind::compute:
      return time_at(op.amount, cost.compute_rate);
    case OpKind::optimizer:
      return time_at(op.amount, cpu ? cost.cpu_update_rate : cost.device_update_rate);
    case OpKind::elementwise:
      return time_at(op.amount, cpu ? cost.cpu_bytes_rate : cost.device_bytes_rate);
    case OpKind::copy:
      break;
  }
  require(lane == "h2d" || lane == "d2h", fmt::format("{} copies in lane {}; expected h2d or d2h", op.name, lane));
  return cost.latency.value + time_at(op.amount, lane == "h2d" ? cost.upload_bandwidth : cost.download_bandwidth);
}

// factors[a][b]: how many times as long ops of lane a take while lane b is busy.
using Factors = std::vector<std::vector<double>>;

Factors factors_of(const OpGraph& graph, const CostModel& cost) {
  const auto lanes = graph.lanes();
  Factors out(lanes.size(), std::vector<double>(lanes.size(), 1));
  for (const Slowdown& slowdown : cost.slowdowns) {
    require(std::isfinite(slowdown.factor) && slowdown.factor >= 1,
            fmt::format("a slowdown of {} beside {} is {}; expected 1 or more", slowdown.lane, slowdown.beside,
                        slowdown.factor));
    const auto number = [&](const std::string& name) {
      const auto found = std::find(lanes.begin(), lanes.end(), name);
      require(found != lanes.end(), fmt::format("a slowdown names lane {}, which the run does not have", name));
      return static_cast<std::size_t>(found - lanes.begin());
    };
    out[number(slowdown.lane)][number(slowdown.beside)] *= slowdown.factor;
  }
  return out;
}

// Plays a graph event by event: the host submits until it has to wait, every lane runs the op at its head.
class Play {
 public:
  Play(const OpGraph& graph, const CostModel& cost)
      : graph_(graph), cost_(cost), factors_(factors_of(graph, cost)), lanes_(graph.lanes().size()) {
    for (const std::string& name : graph.lanes()) out_.lanes.push_back({name, 0, {}, {}});
    out_.ops.resize(graph.ops().size());
    done_.resize(graph.ops().size());
    for (std::size_t i = 0; i < graph.ops().size(); ++i) lane_of(i).queue.push_back(i);
    for (const RecordedWait& wait : graph.waits()) {
      const bool host = wait.side == RecordedWait::Side::host || cost.host_computes;
      (host ? host_waits_ : compute_waits_).push_back(wait);
    }
  }

  Timeline run() {
    while (true) {
      while (submit() || start()) {
      }
      if (!advance()) break;
    }
    check(std::find(done_.begin(), done_.end(), false) == done_.end(), "every op of a graph comes to its turn");
    return std::move(out_);
  }

 private:
  struct LaneState {
    std::vector<std::size_t> queue;  // its ops
    std::size_t next = 0;            // in the queue: the one that runs, or runs next
    bool busy = false;
    double left = 0;    // of the op that runs, in seconds at full speed, at `since`
    double since = 0;   // when its factor last changed
    double factor = 1;  // how many times as long it takes now
    double end = 0;     // if nothing changes
  };

  LaneState& lane_of(std::size_t op) { return lanes_[static_cast<std::size_t>(graph_.ops()[op].lane)]; }
  bool is_compute(std::size_t op) const {
    return out_.lanes[static_cast<std::size_t>(graph_.ops()[op].lane)].name == "compute";
  }
  bool done(std::int64_t op) const { return done_[static_cast<std::size_t>(op)]; }

  /// Passes the waits that hold back op `op`; false while one of them goes on.
  bool pass(const std::vector<RecordedWait>& waits, std::size_t& next, std::size_t op) const {
    while (next < waits.size() && waits[next].before <= static_cast<std::int64_t>(op)) {
      if (!done(waits[next].op)) return false;
      ++next;
    }
    return true;
  }

  /// The host submits what it can. Returns whether that was anything.
  bool submit() {
    const std::size_t before = submitted_;
    while (submitted_ < done_.size() && pass(host_waits_, next_host_wait_, submitted_)) {
      const bool computing =
          cost_.host_computes && submitted_ > 0 && is_compute(submitted_ - 1) && !done_[submitted_ - 1];
      if (computing) break;
      ++submitted_;
    }
    return submitted_ > before;
  }

  bool ready(std::size_t op) {
    if (op >= submitted_) return false;
    if (is_compute(op) && !pass(compute_waits_, next_compute_wait_, op)) return false;
    const auto& after = graph_.ops()[op].after;
    return std::all_of(after.begin(), after.end(), [this](std::int64_t other) { return done(other); });
  }

  /// Starts what can start. Returns whether something ended with it, having taken no time.
  bool start() {
    bool ended = false;
    for (LaneState& lane : lanes_) {
      while (!lane.busy && lane.next < lane.queue.size() && ready(lane.queue[lane.next])) {
        const std::size_t op = lane.queue[lane.next];
        begin(lane, op);
        if (lane.left > 0) break;
        finish(lane);
        ended = true;
      }
    }
    return ended;
  }

  void begin(LaneState& lane, std::size_t op) {
    out_.ops[op].begin.value = now_;
    lane.busy = true;
    lane.left = seconds_of(graph_.ops()[op], name_of(lane), cost_);
    lane.since = now_;
    lane.factor = 1;
    lane.end = now_ + lane.left;
  }

  const std::string& name_of(const LaneState& lane) const {
    return out_.lanes[static_cast<std::size_t>(&lane - lanes_.data())].name;
  }

  /// Goes to the next end of an op. Returns whether there was one.
  bool advance() {
    double next = std::numeric_limits<double>::infinity();
    for (LaneState& lane : lanes_) {
      if (!lane.busy) continue;
      slow_down(lane);
      next = std::min(next, lane.end);
    }
    if (!std::isfinite(next)) return false;
    now_ = next;
    for (LaneState& lane : lanes_) {
      if (lane.busy && lane.end <= now_) finish(lane);
    }
    return true;
  }

  void slow_down(LaneState& lane) {
    const std::vector<double>& factors = factors_[static_cast<std::size_t>(&lane - lanes_.data())];
    double factor = 1;
    for (std::size_t b = 0; b < lanes_.size(); ++b) factor *= lanes_[b].busy && &lanes_[b] != &lane ? factors[b] : 1;
    if (factor == lane.factor) return;
    lane.left -= (now_ - lane.since) / lane.factor;
    lane.since = now_;
    lane.factor = factor;
    lane.end = now_ + std::max(0.0, lane.left) * factor;
  }

  void finish(LaneState& lane) {
    const std::size_t op = lane.queue[lane.next++];
    lane.busy = false;
    done_[op] = true;
    out_.ops[op].end.value = now_;
    LaneTime& time = out_.lanes[static_cast<std::size_t>(graph_.ops()[op].lane)];
    ++time.ops;
    time.busy.value += now_ - out_.ops[op].begin.value;
    time.end.value = out_.end.value = now_;
  }

  const OpGraph& graph_;
  const CostModel& cost_;
  const Factors factors_;
  std::vector<LaneState> lanes_;
  std::vector<RecordedWait> host_waits_, compute_waits_;
  std::size_t next_host_wait_ = 0, next_compute_wait_ = 0;
  std::size_t submitted_ = 0;  // ops that the host has submitted
  std::vector<bool> done_;
  double now_ = 0;
  Timeline out_;
};

std::int64_t nanoseconds(Seconds time) {
  return std::llround(time.value * 1e9);
}

}  // namespace

Timeline compute_timeline(const OpGraph& graph, const CostModel& cost) {
  check_cost(cost);
  return Play(graph, cost).run();
}

void write_timeline(const OpGraph& graph, const Timeline& timeline, const std::filesystem::path& file) {
  require(timeline.ops.size() == graph.ops().size(), "a timeline is written with the graph that it was made from");
  Trace trace({true, static_cast<std::int64_t>(graph.ops().size()), 0});
  for (std::size_t i = 0; i < graph.ops().size(); ++i) {
    const RecordedOp& op = graph.ops()[i];
    const PlannedSpan& span = timeline.ops[i];
    trace.span(graph.lanes()[static_cast<std::size_t>(op.lane)], op.name, nanoseconds(span.begin),
               nanoseconds(span.end), op.kind == OpKind::copy ? static_cast<std::int64_t>(op.amount) : 0, op.index);
  }
  trace.write_chrome_json(file);
}

}  // namespace spillway
