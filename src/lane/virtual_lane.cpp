// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "spillway/lane/op_graph.h"

namespace spillway {
namespace {

// Records the op in the lane `number` of `graph`.
Ticket record(OpGraph& graph, std::int64_t number, const Op& op) {
  TicketPromise promise(graph.add(number, op));
  promise.complete();
  return promise.ticket();
}

class VirtualLane final : public Lane {
 public:
  VirtualLane(std::string name, OpGraph& graph) : Lane(name), graph_(graph), number_(graph.add_lane(std::move(name))) {}

  Ticket submit(Op op) override { return record(graph_, number_, op); }

 private:
  OpGraph& graph_;
  const std::int64_t number_;
};

class VirtualComputeLane final : public ComputeLane {
 public:
  explicit VirtualComputeLane(OpGraph& graph)
      : ComputeLane("compute"), graph_(graph), number_(graph.add_lane("compute")) {}

  Ticket submit(Op op) override { return record(graph_, number_, op); }
  void wait(const Ticket& ticket) override { graph_.wait(ticket, RecordedWait::Side::compute); }
  Ticket mark(const char* name, std::int64_t index, double flops) override {
    return record(graph_, number_, {name, index, OpKind::compute, flops, {}, {}});
  }

 private:
  OpGraph& graph_;
  const std::int64_t number_;
};

}  // namespace

std::unique_ptr<Lane> make_virtual_lane(std::string name, OpGraph& graph) {
  return std::make_unique<VirtualLane>(std::move(name), graph);
}

std::unique_ptr<ComputeLane> make_virtual_compute_lane(OpGraph& graph) {
  return std::make_unique<VirtualComputeLane>(graph);
}

}  // namespace spillway
