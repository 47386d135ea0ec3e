// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spillway/core/config.h"
#include "spillway/core/units.h"
#include "spillway/state/model_config.h"

namespace spillway::bench {

/// What the report's JSON is called; its keys are described in docs/benchmarks.md.
inline constexpr const char* kSchema = "spillway.offload_bench.1";

/// What is measured, and how long.
struct Options {
  DeviceConfig device;
  std::vector<int> threads;     // of the CPU optimizer
  std::vector<Bytes> sizes;     // of copies, ascending
  double seconds = 0;           // a measurement
  int rounds = 0;               // of measurements that are compared with each other
  std::int64_t matmul = 0;      // rows and columns of the product
  int compute_threads = 0;      // of LibTorch
  std::int64_t parameters = 0;  // of the CPU optimizer's measurements
  ModelConfig model;            // of the training step
  std::int64_t batch = 0, length = 0;
  std::string json;  // a file; empty: none
};

/// The command line as options. Where nothing is to be measured (help, or a flag that cannot be, which is explained on
/// standard error) there are none, and `exit_code` is set.
std::optional<Options> parse_options(int argc, char** argv, int& exit_code);

}  // namespace spillway::bench
