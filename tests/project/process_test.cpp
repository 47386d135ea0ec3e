// SPDX-License-Identifier: Apache-2.0
// A process holds one copy of each runtime: two OpenMP runtimes in one process crash or crawl, and two CUDA runtimes or
// NCCLs do not share their state.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "project/mapped_libraries.h"

namespace {

using spillway::test::listed;
using spillway::test::mapped;

TEST(Process, HoldsOneOpenMpRuntime) {
  // Large enough for LibTorch to start its threads.
  const torch::Tensor a = torch::ones({256, 256});
  ASSERT_EQ(torch::mm(a, a).sum().item<double>(), 256.0 * 256.0 * 256.0);
  const auto runtimes = mapped({"libgomp", "libiomp5", "libomp"});
  EXPECT_EQ(runtimes.size(), 1u) << listed(runtimes);
}

TEST(Process, HoldsOneCudaRuntimeAndOneNcclAtMost) {
  const auto cudart = mapped({"libcudart"});
  EXPECT_LE(cudart.size(), 1u) << listed(cudart);
#ifdef SPILLWAY_TORCH_CUDA
  EXPECT_EQ(cudart.size(), 1u);                     // Spillway's and LibTorch's are the same
  EXPECT_FALSE(mapped({"libtorch_cuda"}).empty());  // linked although no symbol of it is named
#endif
  const auto nccl = mapped({"libnccl"});
  EXPECT_LE(nccl.size(), 1u) << listed(nccl);
}

TEST(Process, HoldsOneLibTorch) {
  EXPECT_EQ(mapped({"libtorch_cpu"}).size(), 1u);
  EXPECT_EQ(mapped({"libc10"}).size(), 1u);
}

}  // namespace
