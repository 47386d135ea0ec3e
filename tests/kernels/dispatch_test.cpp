// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <set>
#include <sstream>
#include <string>

#include "kernels/cpu_kernels.h"

namespace spillway::kernels {
namespace {

TEST(Dispatch, BaselineComesFirstAndTheFastestIsTheDefault) {
  const auto names = cpu_kernel_names();
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(names.front(), "baseline");
  EXPECT_EQ(names.back(), cpu_kernels().name);
}

TEST(Dispatch, EveryNameFindsItsOwnSet) {
  for (std::string_view name : cpu_kernel_names()) {
    const CpuKernels* set = cpu_kernels(name);
    ASSERT_NE(set, nullptr) << name;
    EXPECT_EQ(set->name, name);
  }
  EXPECT_EQ(cpu_kernels("avx1024"), nullptr);
  EXPECT_EQ(cpu_kernels(""), nullptr);
}

#if defined(__x86_64__) && defined(__linux__)

std::set<std::string> processor_flags() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("flags")) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

TEST(Dispatch, ASetIsOfferedExactlyWhereTheProcessorHasItsInstructions) {
  const auto flags = processor_flags();
  ASSERT_TRUE(flags.contains("sse2"));
  const auto has = [&](std::initializer_list<const char*> wanted) {
    return std::ranges::all_of(wanted, [&](const char* flag) { return flags.contains(flag); });
  };
  EXPECT_EQ(cpu_kernels("avx2") != nullptr, has({"avx2", "f16c"}));
  EXPECT_EQ(cpu_kernels("avx512") != nullptr, has({"avx512f", "avx512bw", "avx512dq", "avx512vl", "f16c"}));
}

#endif

}  // namespace
}  // namespace spillway::kernels
