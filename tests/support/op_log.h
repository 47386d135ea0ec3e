// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "spillway/lane/op_graph.h"

namespace spillway::test {

/// What is compared of an op.
struct LoggedOp {
  std::string name;
  std::int64_t index = -1;
  OpKind kind = OpKind::compute;
  double amount = 0;

  bool operator==(const LoggedOp&) const = default;
  friend std::ostream& operator<<(std::ostream& out, const LoggedOp& op) {
    return out << op.name << "[" << op.index << "] " << to_string(op.kind) << " " << op.amount;
  }
};

/// Writes down what real lanes run, in order, with a number for each begin and end.
class OpLog {
 public:
  struct Times {
    std::int64_t begin = -1, end = -1;
  };

  /// For MachineOptions::delay; lanes call it at the begin and at the end of every op.
  OpDelay delay() {
    return [shared = shared_](const std::string& lane, const Op& op) {
      const std::scoped_lock lock(shared->mutex);
      Lane& log = shared->lanes[lane];
      if (!std::exchange(log.inside, !log.inside)) {
        log.ops.push_back({op.name, op.index, op.kind, op.amount});
        log.times.push_back({shared->next++, -1});
      } else {
        log.times.back().end = shared->next++;
      }
    };
  }

  /// Once the lanes are idle.
  const std::vector<LoggedOp>& ops(const std::string& lane) { return shared_->lanes[lane].ops; }
  const std::vector<Times>& times(const std::string& lane) { return shared_->lanes[lane].times; }

 private:
  struct Lane {
    bool inside = false;
    std::vector<LoggedOp> ops;
    std::vector<Times> times;
  };
  struct Shared {
    std::mutex mutex;
    std::map<std::string, Lane> lanes;
    std::int64_t next = 0;
  };
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

/// A recorded lane's ops without marks, which no real lane runs as ops.
inline std::vector<LoggedOp> ops_of(const OpGraph& graph, std::size_t lane) {
  std::vector<LoggedOp> out;
  for (const RecordedOp& op : graph.ops()) {
    if (op.lane == static_cast<std::int64_t>(lane) && op.kind != OpKind::compute)
      out.push_back({op.name, op.index, op.kind, op.amount});
  }
  return out;
}

/// Fails the present test where a lane of the real run did other ops, or in another order, than were recorded.
/// Returns the number of ops that agreed.
inline std::size_t expect_same_ops(const OpGraph& recorded, OpLog& real) {
  std::size_t count = 0;
  for (std::size_t lane = 0; lane < recorded.lanes().size(); ++lane) {
    const std::string& name = recorded.lanes()[lane];
    const std::vector<LoggedOp> expected = ops_of(recorded, lane);
    const std::vector<LoggedOp>& actual = real.ops(name);
    EXPECT_EQ(expected.size(), actual.size()) << "lane " << name;
    const auto [e, a] = std::mismatch(expected.begin(), expected.end(), actual.begin(), actual.end());
    if (e != expected.end() && a != actual.end())
      ADD_FAILURE() << "op " << e - expected.begin() << " of lane " << name << " is " << *a << ", recorded was " << *e;
    count += expected.size();
  }
  return count;
}

}  // namespace spillway::test
