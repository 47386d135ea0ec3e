// SPDX-License-Identifier: Apache-2.0
#include "spillway/plan/timeline.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/plan/record_run.h"

namespace spillway {
namespace {

/// A graph with the four lanes of a machine.
struct Lanes {
  OpGraph graph;
  std::unique_ptr<ComputeLane> compute = make_virtual_compute_lane(graph);
  std::unique_ptr<Lane> down = make_virtual_lane("d2h", graph);
  std::unique_ptr<Lane> cpu = make_virtual_lane("cpu", graph);
  std::unique_ptr<Lane> up = make_virtual_lane("h2d", graph);

  static Ticket add(Lane& lane, const char* name, OpKind kind, double amount, std::vector<Ticket> after = {}) {
    return lane.submit({name, 4, kind, amount, std::move(after), {}});
  }
};

CostModel cost() {
  CostModel out;
  out.upload_bandwidth = 10;
  out.download_bandwidth = 20;
  out.latency = {0.5};
  out.compute_rate = 100;
  out.cpu_update_rate = 5;
  out.device_update_rate = 50;
  out.cpu_bytes_rate = 8;
  out.device_bytes_rate = 80;
  return out;
}

void expect_spans(const Timeline& timeline, const std::vector<std::pair<double, double>>& expected) {
  ASSERT_EQ(timeline.ops.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_DOUBLE_EQ(timeline.ops[i].begin.value, expected[i].first) << "op " << i;
    EXPECT_DOUBLE_EQ(timeline.ops[i].end.value, expected[i].second) << "op " << i;
  }
}

TEST(Timeline, EachKindOfOpTakesItsLanesTime) {
  Lanes l;
  Lanes::add(*l.compute, "update", OpKind::optimizer, 100);   // 2
  Lanes::add(*l.compute, "stage", OpKind::elementwise, 160);  // 2
  static_cast<void>(l.compute->mark("forward", 0, 300));      // 3
  Lanes::add(*l.down, "down", OpKind::copy, 30);              // 0.5 + 1.5
  Lanes::add(*l.cpu, "update", OpKind::optimizer, 10);        // 2
  Lanes::add(*l.cpu, "accumulate", OpKind::elementwise, 4);   // 0.5
  Lanes::add(*l.up, "up", OpKind::copy, 20);                  // 0.5 + 2
  const Timeline timeline = compute_timeline(l.graph, cost());
  expect_spans(timeline, {{0, 2}, {2, 4}, {4, 7}, {0, 2}, {0, 2}, {2, 2.5}, {0, 2.5}});
  EXPECT_EQ(timeline.end.value, 7);
  EXPECT_EQ(timeline.lanes[0].busy.value, 7);
  EXPECT_EQ(timeline.lanes[2].ops, 2);
  EXPECT_EQ(timeline.lanes[2].busy.value, 2.5);
  EXPECT_EQ(timeline.lanes[3].name, "h2d");
}

/// compute 1 s -> down 1 s -> cpu 1 s; the host waits for the cpu, then computes 1 s more.
TEST(Timeline, ADependentOpStartsWhenItsLastDependencyEnds) {
  Lanes l;
  const Ticket a = l.compute->mark("a", 0, 100);                                // 0 to 1
  const Ticket b = Lanes::add(*l.down, "b", OpKind::copy, 10, {a});             // 1 to 2
  const Ticket c = Lanes::add(*l.up, "c", OpKind::copy, 45);                    // 0 to 5
  const Ticket d = Lanes::add(*l.cpu, "d", OpKind::elementwise, 8, {b, c, a});  // 5 to 6
  static_cast<void>(Lanes::add(*l.down, "e", OpKind::copy, 0));                 // 2 to 2.5, after b in its lane
  expect_spans(compute_timeline(l.graph, cost()), {{0, 1}, {1, 2}, {0, 5}, {5, 6}, {2, 2.5}});
  EXPECT_EQ(d.op(), 3);
}

TEST(Timeline, AHostWaitHoldsBackEverythingSubmittedLater) {
  Lanes l;
  const Ticket a = Lanes::add(*l.cpu, "norm", OpKind::elementwise, 24);  // 0 to 3
  static_cast<void>(l.compute->mark("before", 0, 50));                   // 0 to 0.5
  l.graph.wait(a, RecordedWait::Side::host);
  static_cast<void>(l.compute->mark("after", 0, 100));          // 3 to 4
  static_cast<void>(Lanes::add(*l.up, "up", OpKind::copy, 5));  // 3 to 4
  expect_spans(compute_timeline(l.graph, cost()), {{0, 3}, {0, 0.5}, {3, 4}, {3, 4}});
}

TEST(Timeline, AComputeWaitHoldsBackComputeAloneUnlessTheHostComputes) {
  Lanes l;
  const Ticket a = Lanes::add(*l.up, "a", OpKind::copy, 15);  // 0 to 2
  l.compute->wait(a);
  static_cast<void>(l.compute->mark("forward", 0, 100));  // 2 to 3
  static_cast<void>(Lanes::add(*l.cpu, "b", OpKind::elementwise, 8));
  static_cast<void>(l.compute->mark("more", 0, 100));
  static_cast<void>(Lanes::add(*l.down, "c", OpKind::copy, 10));
  CostModel model = cost();
  expect_spans(compute_timeline(l.graph, model), {{0, 2}, {2, 3}, {0, 1}, {3, 4}, {0, 1}});
  model.host_computes = true;
  expect_spans(compute_timeline(l.graph, model), {{0, 2}, {2, 3}, {3, 4}, {3, 4}, {4, 5}});
}

TEST(Timeline, LanesThatShareSomethingSlowEachOther) {
  Lanes l;
  static_cast<void>(Lanes::add(*l.cpu, "a", OpKind::elementwise, 32));  // 4 s alone
  static_cast<void>(l.compute->mark("forward", 0, 200));                // 2 s alone
  static_cast<void>(Lanes::add(*l.up, "b", OpKind::copy, 5));           // 1 s alone
  CostModel model = cost();
  model.slowdowns = {{"cpu", "compute", 2}, {"cpu", "h2d", 2}, {"compute", "cpu", 1.5}};
  // cpu: a quarter of full speed for 1 s (0.25 done), half until compute ends at 3 s (1.25 done), then 2.75 s more.
  expect_spans(compute_timeline(l.graph, model), {{0, 5.75}, {0, 3}, {0, 1}});
  model.slowdowns.push_back({"cpu", "disk", 2});
  EXPECT_THROW(compute_timeline(l.graph, model), InvalidArgument);
  model.slowdowns = {{"cpu", "compute", 0.5}};
  EXPECT_THROW(compute_timeline(l.graph, model), InvalidArgument);
}

TEST(Timeline, RefusesRatesThatAreNoneAndCopiesWithoutALink) {
  Lanes l;
  CostModel model = cost();
  model.compute_rate = -1;
  EXPECT_THROW(compute_timeline(l.graph, model), InvalidArgument);
  model.compute_rate = std::numeric_limits<double>::infinity();
  EXPECT_THROW(compute_timeline(l.graph, model), InvalidArgument);
  static_cast<void>(Lanes::add(*l.cpu, "copy", OpKind::copy, 1));
  EXPECT_THROW(compute_timeline(l.graph, cost()), InvalidArgument);
}

TEST(Timeline, IsWrittenAsATrace) {
  Lanes l;
  const Ticket a = l.compute->mark("forward", 7, 100);
  static_cast<void>(Lanes::add(*l.down, "gradients down", OpKind::copy, 10, {a}));
  const auto file = std::filesystem::temp_directory_path() / ("spillway-timeline-" + std::to_string(getpid()));
  write_timeline(l.graph, compute_timeline(l.graph, cost()), file);
  std::ifstream stream(file);
  const auto json = nlohmann::json::parse(stream);
  std::filesystem::remove(file);
  int found = 0;
  for (const auto& event : json.at("traceEvents")) {
    if (event.value("name", "") != "gradients down") continue;
    EXPECT_DOUBLE_EQ(event.at("ts").get<double>(), 1e6);
    EXPECT_DOUBLE_EQ(event.at("dur").get<double>(), 1e6);
    ++found;
  }
  EXPECT_EQ(found, 1);
}

/// Two schedules of one model, on a link so slow that what crosses it is all that counts.
TEST(Timeline, OfARecordedRunIsItsTrafficWhereTheLinkIsSlow) {
  const std::int64_t elements = 64 * 1024, chunk = 8 * 1024;
  const Layout layout({{"a", {elements / 2}, 0}, {"b", {elements / 2}, 0}}, chunk);
  ModelEvents events;
  events.gates = {{{0}, elements / 2.0}, {{1}, elements / 2.0}};
  events.gradients = {{1, 0}};
  CostModel model;
  model.upload_bandwidth = model.download_bandwidth = 1000;
  const auto end_of = [&](const char* name) {
    const ScheduleEntry& schedule = find_schedule(name);
    StateSpec spec;
    spec.placement.assign(layout.chunks().size(), schedule.placement);
    spec.device_slots = spec.pinned_slots = schedule.stages ? 2 : 0;
    RecordOptions options;
    options.steps = 3;
    return compute_timeline(record_run(layout, spec, schedule, events, options).graph, model).end.value;
  };
  EXPECT_EQ(end_of("resident"), 0);
  // Down in backward, then up; the next forward waits for all of it: three steps of both ways.
  EXPECT_NEAR(end_of("zero_offload"), 3 * 2 * elements * 4 / 1000.0, 1e-6);
}

}  // namespace
}  // namespace spillway
