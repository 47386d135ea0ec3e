// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "spillway/lane/lane.h"

namespace spillway {

/// An op as a virtual lane recorded it. Marks of the compute lane are ops of kind compute.
struct RecordedOp {
  std::int64_t lane = 0;    // in OpGraph::lanes()
  const char* name = "";    // a literal
  std::int64_t index = -1;  // the chunk or block it concerns; below zero: none
  OpKind kind = OpKind::compute;
  double amount = 0;
  /// The ops whose tickets it was given, ascending, each once. That it also follows the op before it in its lane, and
  /// what was waited for before it, is understood.
  std::vector<std::int64_t> after;

  bool operator==(const RecordedOp& other) const;
};

/// A wait for an op: an edge to everything submitted later.
struct RecordedWait {
  enum class Side : unsigned char {
    host,    // to every op from `before` on
    compute  // to the compute lane's ops from `before` on, and so to what LibTorch computes from then on
  };
  std::int64_t op = 0;
  std::int64_t before = 0;
  Side side = Side::host;

  bool operator==(const RecordedWait&) const = default;
};

/// What a run does, without its times: ops in the order of submission, each with what it waits for. An op's number is
/// its place in that order, so every edge leads from a smaller number to a larger one.
class OpGraph {
 public:
  /// Returns the lane's number. Names are those of the real machine's lanes.
  std::int64_t add_lane(std::string name);
  /// Returns the op's number. `op.body` is dropped.
  std::int64_t add(std::int64_t lane, const Op& op);
  /// Notes a wait for `ticket`. One that nothing recorded, or that was waited for already, changes nothing.
  void wait(const Ticket& ticket, RecordedWait::Side side);

  std::span<const std::string> lanes() const { return lanes_; }
  std::span<const RecordedOp> ops() const { return ops_; }
  /// In the order in which they happened: `before` never falls.
  std::span<const RecordedWait> waits() const { return waits_; }

  bool operator==(const OpGraph& other) const {
    return lanes_ == other.lanes_ && ops_ == other.ops_ && waits_ == other.waits_;
  }

 private:
  struct Waited {
    bool by_host = false, by_compute = false;
  };

  std::vector<std::string> lanes_;
  std::vector<RecordedOp> ops_;
  std::vector<RecordedWait> waits_;
  std::vector<Waited> waited_;  // one an op
};

/// {"lanes": [name], "ops": [{lane, name, index, kind, amount, after}], "waits": [{op, before, side}]}
std::string to_json(const OpGraph& graph);

/// Lanes that record what they are given in `graph`, which must outlive them, and run nothing. Their tickets are done
/// and carry the op's number. A compute lane's wait is recorded.
std::unique_ptr<Lane> make_virtual_lane(std::string name, OpGraph& graph);
std::unique_ptr<ComputeLane> make_virtual_compute_lane(OpGraph& graph);

}  // namespace spillway
