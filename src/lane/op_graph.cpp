// SPDX-License-Identifier: Apache-2.0
#include "spillway/lane/op_graph.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

namespace spillway {

std::string_view to_string(OpKind kind) {
  switch (kind) {
    case OpKind::compute:
      return "compute";
    case OpKind::copy:
      return "copy";
    case OpKind::optimizer:
      return "optimizer";
    case OpKind::elementwise:
      return "elementwise";
  }
  return "unknown";
}

bool RecordedOp::operator==(const RecordedOp& other) const {
  return lane == other.lane && std::string_view(name) == other.name && index == other.index && kind == other.kind &&
         amount == other.amount && after == other.after;
}

std::int64_t OpGraph::add_lane(std::string name) {
  lanes_.push_back(std::move(name));
  return static_cast<std::int64_t>(lanes_.size()) - 1;
}

std::int64_t OpGraph::add(std::int64_t lane, const Op& op) {
  RecordedOp recorded{lane, op.name, op.index, op.kind, op.amount, {}};
  for (const Ticket& ticket : op.after) {
    if (ticket.op() >= 0) recorded.after.push_back(ticket.op());
  }
  std::sort(recorded.after.begin(), recorded.after.end());
  recorded.after.erase(std::unique(recorded.after.begin(), recorded.after.end()), recorded.after.end());
  ops_.push_back(std::move(recorded));
  waited_.emplace_back();
  return static_cast<std::int64_t>(ops_.size()) - 1;
}

void OpGraph::wait(const Ticket& ticket, RecordedWait::Side side) {
  if (ticket.op() < 0) return;
  Waited& waited = waited_[static_cast<std::size_t>(ticket.op())];
  if (waited.by_host) return;  // everything submitted since follows it already
  if (side == RecordedWait::Side::compute && std::exchange(waited.by_compute, true)) return;
  if (side == RecordedWait::Side::host) waited.by_host = true;
  waits_.push_back({ticket.op(), static_cast<std::int64_t>(ops_.size()), side});
}

std::string to_json(const OpGraph& graph) {
  nlohmann::ordered_json out;
  out["lanes"] = std::vector<std::string>(graph.lanes().begin(), graph.lanes().end());
  out["ops"] = nlohmann::ordered_json::array();
  for (const RecordedOp& op : graph.ops()) {
    out["ops"].push_back({{"lane", op.lane},
                          {"name", op.name},
                          {"index", op.index},
                          {"kind", to_string(op.kind)},
                          {"amount", op.amount},
                          {"after", op.after}});
  }
  out["waits"] = nlohmann::ordered_json::array();
  for (const RecordedWait& wait : graph.waits()) {
    out["waits"].push_back({{"op", wait.op},
                            {"before", wait.before},
                            {"side", wait.side == RecordedWait::Side::host ? "host" : "compute"}});
  }
  return out.dump(1) + "\n";
}

}  // namespace spillway
