// SPDX-License-Identifier: Apache-2.0
// A process holds one copy of each runtime: two OpenMP runtimes in one process crash or crawl, and two CUDA runtimes or
// NCCLs do not share their state.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

namespace {

// The different shared libraries of these names that are mapped into this process, whatever follows the name:
// "libgomp" finds libgomp.so.1 and libgomp-a34b3233.so.1.
std::set<std::string> mapped(const std::vector<std::string>& names) {
  std::set<std::string> files;
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    const auto slash = line.find('/');
    if (slash == std::string::npos) continue;
    const std::string path = line.substr(slash);
    const std::string file = std::filesystem::path(path).filename().string();
    for (const std::string& name : names) {
      if (file.rfind(name + ".", 0) == 0 || file.rfind(name + "-", 0) == 0) files.insert(path);
    }
  }
  return files;
}

std::string listed(const std::set<std::string>& files) {
  std::string text;
  for (const std::string& file : files) text += "\n  " + file;
  return text;
}

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
  const auto nccl = mapped({"libnccl"});
  EXPECT_LE(nccl.size(), 1u) << listed(nccl);
}

TEST(Process, HoldsOneLibTorch) {
  EXPECT_EQ(mapped({"libtorch_cpu"}).size(), 1u);
  EXPECT_EQ(mapped({"libc10"}).size(), 1u);
}

}  // namespace
