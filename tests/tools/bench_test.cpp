// SPDX-License-Identifier: Apache-2.0
#include "tools/bench.h"

#include <gtest/gtest.h>

#include <thread>

#include "kernels/cpu_kernels.h"
#include "spillway/core/error.h"

namespace spillway::tools {
namespace {

/// On a thread of its own, which the team moves to a core.
std::string bench_apart(const BenchOptions& options) {
  std::string text;
  std::thread([&] { text = bench(options); }).join();
  return text;
}

TEST(Bench, SaysWhatIsChosenAndMeasuresEveryForm) {
  for (std::string_view name : kernels::cpu_kernel_names()) {
    const std::string text =
        bench_apart({.instruction_set = std::string(name), .threads = 1, .parameters = 4096, .rounds = 1});
    EXPECT_NE(text.find("chosen                  " + std::string(name)), std::string::npos) << text;
    EXPECT_NE(text.find("1 thread on core "), std::string::npos) << text;
    for (const char* form : {"fp32, bf16 gradients and copy", "split master, bf16 states", "8-bit states"}) {
      EXPECT_NE(text.find(form), std::string::npos) << text;
    }
  }
  const std::string fastest = bench_apart({.threads = 2, .cores = "any", .parameters = 4096, .rounds = 1});
  EXPECT_NE(fastest.find("chosen                  " + std::string(kernels::cpu_kernels().name)), std::string::npos);
  EXPECT_NE(fastest.find("2 threads anywhere: as asked for"), std::string::npos) << fastest;
}

TEST(Bench, RefusesWhatIsNotThere) {
  EXPECT_THROW(bench({.instruction_set = "mmx"}), InvalidArgument);
  EXPECT_THROW(bench({.threads = 2, .cores = "0"}), InvalidArgument);
}

}  // namespace
}  // namespace spillway::tools
