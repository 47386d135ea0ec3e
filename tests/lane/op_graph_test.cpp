// SPDX-License-Identifier: Apache-2.0
#include "spillway/lane/op_graph.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace spillway {
namespace {

Op op(const char* name, std::vector<Ticket> after) {
  return {name, 3, OpKind::copy, 64, std::move(after), [](StreamRef) { throw std::logic_error("a recorded op ran"); }};
}

TEST(VirtualLanes, RecordOpsInOrderWithWhatTheyDependOnAndRunNone) {
  OpGraph graph;
  const auto compute = make_virtual_compute_lane(graph);
  const auto down = make_virtual_lane("d2h", graph);
  const Ticket first = compute->mark("forward", 7, 100);
  const Ticket second = down->submit(op("down", {first}));
  const Ticket third = down->submit(op("again", {second, Ticket(), first, second}));
  EXPECT_TRUE(third.done());
  third.wait();  // neither blocks nor throws
  EXPECT_EQ(first.op(), 0);
  EXPECT_EQ(third.op(), 2);
  EXPECT_EQ(Ticket().op(), -1);
  ASSERT_EQ(graph.ops().size(), 3U);
  EXPECT_EQ(graph.ops()[0], (RecordedOp{0, "forward", 7, OpKind::compute, 100, {}}));
  EXPECT_EQ(graph.ops()[1], (RecordedOp{1, "down", 3, OpKind::copy, 64, {0}}));
  EXPECT_EQ(graph.ops()[2], (RecordedOp{1, "again", 3, OpKind::copy, 64, {0, 1}}));
  EXPECT_EQ(std::vector<std::string>(graph.lanes().begin(), graph.lanes().end()),
            (std::vector<std::string>{"compute", "d2h"}));
}

TEST(OpGraph, KeepsEachWaitOnceWithWhatFollowsIt) {
  OpGraph graph;
  const auto compute = make_virtual_compute_lane(graph);
  const auto up = make_virtual_lane("h2d", graph);
  const Ticket a = up->submit(op("a", {})), b = up->submit(op("b", {}));
  compute->wait(a);
  compute->wait(a);
  compute->wait(Ticket());
  const Ticket c = up->submit(op("c", {}));
  graph.wait(a, RecordedWait::Side::host);
  graph.wait(b, RecordedWait::Side::host);
  compute->wait(b);  // follows already
  graph.wait(b, RecordedWait::Side::host);
  EXPECT_EQ(
      std::vector<RecordedWait>(graph.waits().begin(), graph.waits().end()),
      (std::vector<RecordedWait>{
          {0, 2, RecordedWait::Side::compute}, {0, 3, RecordedWait::Side::host}, {1, 3, RecordedWait::Side::host}}));
}

TEST(OpGraph, WritesWhatItHoldsAsJson) {
  OpGraph graph;
  const auto up = make_virtual_lane("h2d", graph);
  const Ticket a = up->submit(op("parameters \"up\"", {}));
  graph.wait(up->submit(op("b", {a})), RecordedWait::Side::host);
  const auto json = nlohmann::json::parse(to_json(graph));
  EXPECT_EQ(json.at("lanes"), (nlohmann::json{"h2d"}));
  EXPECT_EQ(json.at("ops").size(), 2U);
  EXPECT_EQ(json["ops"][0].at("name"), "parameters \"up\"");
  EXPECT_EQ(json["ops"][0].at("kind"), "copy");
  EXPECT_EQ(json["ops"][0].at("index"), 3);
  EXPECT_EQ(json["ops"][0].at("amount"), 64);
  EXPECT_EQ(json["ops"][1].at("after"), nlohmann::json(std::vector<int>{0}));
  EXPECT_EQ(json.at("waits"), nlohmann::json::parse(R"([{"op": 1, "before": 2, "side": "host"}])"));
}

}  // namespace
}  // namespace spillway
