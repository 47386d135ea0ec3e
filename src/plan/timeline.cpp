// SPDX-License-Identifier: Apache-2.0
#include "spillway/plan/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

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

// How far the host and each lane have come while the graph is walked in the order of submission.
class Walk {
 public:
  Walk(const OpGraph& graph, const CostModel& cost) : graph_(graph), cost_(cost) {
    for (const std::string& name : graph.lanes()) out_.lanes.push_back({name, 0, {}, {}});
    out_.ops.reserve(graph.ops().size());
  }

  Timeline run() {
    for (std::size_t i = 0; i < graph_.ops().size(); ++i) {
      pass_waits(static_cast<std::int64_t>(i));
      place(graph_.ops()[i]);
    }
    return std::move(out_);
  }

 private:
  double end_of(std::int64_t op) const { return out_.ops[static_cast<std::size_t>(op)].end.value; }

  /// What was waited for before op `next` was submitted.
  void pass_waits(std::int64_t next) {
    for (; next_wait_ < graph_.waits().size() && graph_.waits()[next_wait_].before <= next; ++next_wait_) {
      const RecordedWait& wait = graph_.waits()[next_wait_];
      const bool host = wait.side == RecordedWait::Side::host || cost_.host_computes;
      double& waiting = host ? host_ : compute_;
      waiting = std::max(waiting, end_of(wait.op));
    }
  }

  void place(const RecordedOp& op) {
    LaneTime& lane = out_.lanes[static_cast<std::size_t>(op.lane)];
    const bool compute = lane.name == "compute";
    double begin = std::max(lane.end.value, host_);
    if (compute) begin = std::max(begin, compute_);
    for (std::int64_t before : op.after) begin = std::max(begin, end_of(before));
    const double time = seconds_of(op, lane.name, cost_), end = begin + time;
    if (compute && cost_.host_computes) host_ = end;
    out_.ops.push_back({{begin}, {end}});
    ++lane.ops;
    lane.busy.value += time;
    lane.end.value = end;
    out_.end.value = std::max(out_.end.value, end);
  }

  const OpGraph& graph_;
  const CostModel& cost_;
  Timeline out_;
  std::size_t next_wait_ = 0;
  double host_ = 0;     // when the host submits what comes next
  double compute_ = 0;  // before which the compute lane starts nothing new
};

std::int64_t nanoseconds(Seconds time) {
  return std::llround(time.value * 1e9);
}

}  // namespace

Timeline compute_timeline(const OpGraph& graph, const CostModel& cost) {
  check_cost(cost);
  return Walk(graph, cost).run();
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
