// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "benchmarks/offload/machine.h"
#include "benchmarks/offload/measure.h"
#include "benchmarks/offload/options.h"

namespace spillway::bench {

/// Copies of one size between the device and a host tier. Units: GB/s, each direction on its own.
struct CopyResult {
  Tier tier = Tier::pinned;
  Bytes size;
  Direction direction = Direction::h2d;
  Spread alone, with_the_other;  // direction
};
std::vector<CopyResult> measure_copies(const Options& options);

/// The optimizer on the CPU.
struct AdamResult {
  int threads = 1;
  bool bf16_copy = false;
  Spread ns_per_parameter, gb_per_second;
};
std::vector<AdamResult> measure_adam(const Options& options);

/// The seconds of an operation of each activity (compute, h2d, d2h, adam) while a set of them runs; sets by name:
/// "compute", "copies", "adam", "compute+copies", "compute+adam", "copies+adam", "compute+copies+adam".
struct Interference {
  std::int64_t copy_bytes = 0;  // of one copy
  int adam_threads = 1;
  std::map<std::string, std::map<std::string, Spread>> sets;

  /// How much slower an activity is in a set than in the one without the others.
  double slowdown(const std::string& activity, const std::string& set) const;
};
Interference measure_interference(const Options& options);

/// A training step of one schedule.
struct StepSchedule {
  std::string schedule;
  Spread seconds;
  std::map<std::string, double> busy_seconds;  // by lane, a step
  std::int64_t device_peak_bytes = 0;
};
struct StepComparison {
  std::int64_t parameters = 0, tokens = 0;
  std::vector<StepSchedule> schedules;  // "resident", "zero_offload"
};
StepComparison measure_steps(const Options& options);

/// Everything.
struct Report {
  MachineFacts machine;
  std::vector<CopyResult> copies;
  std::vector<AdamResult> adam;
  Interference interference;
  StepComparison steps;
};
std::string table(const Report& report, const Options& options);
std::string json(const Report& report, const Options& options);

}  // namespace spillway::bench
