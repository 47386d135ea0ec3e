// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "spillway/core/units.h"
#include "spillway/lane/op_graph.h"

namespace spillway {

/// While lane `beside` is busy, ops of `lane` take `factor` times as long: they share a link, the memory, or cores.
struct Slowdown {
  std::string lane, beside;
  double factor = 1;
};

/// How long ops take. Rates are a second's; a rate of zero: no time.
struct CostModel {
  double upload_bandwidth = 0;    // bytes of the h2d lane
  double download_bandwidth = 0;  // bytes of the d2h lane
  Seconds latency;                // of each copy
  double compute_rate = 0;        // floating-point operations of the device
  double cpu_update_rate = 0;     // elements that the CPU optimizer updates
  double device_update_rate = 0;  // elements that the device updates
  double cpu_bytes_rate = 0;      // bytes that the cpu lane's elementwise ops read and write
  double device_bytes_rate = 0;   // bytes that the device's elementwise ops read and write
  /// Compute runs on the host's thread, as on the emulated device: while the host waits, nothing is computed, and
  /// nothing is submitted while something is.
  bool host_computes = false;
  std::vector<Slowdown> slowdowns = {};  // several multiply
};

/// When an op runs, from the run's begin.
struct PlannedSpan {
  Seconds begin, end;
};

struct LaneTime {
  std::string name;
  std::int64_t ops = 0;
  Seconds busy;
  Seconds end;  // of its last op
};

/// When everything of a run happens.
struct Timeline {
  std::vector<PlannedSpan> ops;  // one a recorded op
  std::vector<LaneTime> lanes;   // as in the graph
  Seconds end;                   // of the last op
};

/// The times of a graph's ops: each starts as soon as its lane is free, the ops it depends on have ended, and the host
/// has come as far as to submit it. Submitting takes no time. The same graph and costs give the same times, bit for
/// bit. Throws: InvalidArgument for a rate or latency that is negative or not finite, a slowdown that is below 1 or
/// names a lane that there is not, and a copy in another lane than h2d and d2h.
Timeline compute_timeline(const OpGraph& graph, const CostModel& cost);

/// Writes a timeline for Perfetto or Chrome, as Trace does that of a real run. Throws: FileError.
void write_timeline(const OpGraph& graph, const Timeline& timeline, const std::filesystem::path& file);

}  // namespace spillway
