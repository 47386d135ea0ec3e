// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace spillway::tools {

struct BenchOptions {
  std::string instruction_set = {};  // empty: the fastest
  int threads = 0;                   // 0: as an engine would take
  std::string cores = {};            // as the configuration's key of that name
  std::int64_t parameters = 20'000'000;
  int rounds = 9;
};

/// What the CPU optimizer does here, for people: the kernels and cores that it takes, and the measured speed of its
/// forms. Blocks: some seconds. Throws: InvalidArgument for a set or cores that are not there.
std::string bench(const BenchOptions& options);

}  // namespace spillway::tools
