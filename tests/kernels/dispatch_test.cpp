// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>

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

#if defined(__x86_64__)
TEST(Dispatch, ASetIsOfferedExactlyWhereTheProcessorHasItsInstructions) {
  const auto names = cpu_kernel_names();
  const auto offered = [&](std::string_view name) { return std::ranges::find(names, name) != names.end(); };
  EXPECT_EQ(offered("avx2"), __builtin_cpu_supports("avx2") != 0);
  EXPECT_EQ(offered("avx512"), __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512f"));
}
#endif

}  // namespace
}  // namespace spillway::kernels
