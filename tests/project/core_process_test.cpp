// SPDX-License-Identifier: Apache-2.0
// The core runs where there is no LibTorch and no CUDA: a planner on a laptop loads neither.
#include <gtest/gtest.h>

#include "project/mapped_libraries.h"
#include "spillway/core/trace.h"

namespace {

using spillway::test::listed;
using spillway::test::mapped;

TEST(CoreProcess, LoadsWhatItIsBuiltWithAlone) {
  spillway::Trace trace;
  trace.span("host", "load", 0, 1);
  ASSERT_EQ(trace.totals().size(), 1u);
  ASSERT_FALSE(mapped({"libstdc++", "libc++"}).empty());  // the list is read right
  const auto torch = mapped({"libtorch", "libtorch_cpu", "libtorch_cuda", "libc10"});
  EXPECT_TRUE(torch.empty()) << listed(torch);
  const auto openmp = mapped({"libgomp", "libiomp5", "libomp"});
  EXPECT_TRUE(openmp.empty()) << listed(openmp);
#ifndef SPILLWAY_WITH_CUDA
  const auto cuda = mapped({"libcuda", "libcudart", "libcurand", "libcublas", "libnccl"});
  EXPECT_TRUE(cuda.empty()) << listed(cuda);
#endif
}

}  // namespace
