// SPDX-License-Identifier: Apache-2.0
// A process holds one copy of each runtime: two OpenMP runtimes in one process crash or crawl, and two CUDA runtimes or
// NCCLs do not share their state.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <string>

namespace {

// The different files mapped into this process whose name matches.
std::set<std::string> mapped(const std::string& pattern) {
  const std::regex wanted(pattern);
  std::set<std::string> files;
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    const auto slash = line.find('/');
    if (slash == std::string::npos) continue;
    const std::string path = line.substr(slash);
    if (std::regex_search(std::filesystem::path(path).filename().string(), wanted)) files.insert(path);
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
  const auto runtimes = mapped("^lib(gomp|iomp5|omp)[-.]");
  EXPECT_EQ(runtimes.size(), 1u) << listed(runtimes);
}

TEST(Process, HoldsOneCudaRuntimeAndOneNcclAtMost) {
  const auto cudart = mapped("^libcudart[-.]");
  EXPECT_LE(cudart.size(), 1u) << listed(cudart);
  const auto nccl = mapped("^libnccl[-.]");
  EXPECT_LE(nccl.size(), 1u) << listed(nccl);
}

TEST(Process, HoldsOneLibTorch) {
  EXPECT_EQ(mapped("^libtorch_cpu\\.so").size(), 1u);
  EXPECT_EQ(mapped("^libc10\\.so").size(), 1u);
}

}  // namespace
