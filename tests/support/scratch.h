// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

namespace spillway::test {

/// A path of this process's own for a test's files; what an earlier test left there is removed.
inline std::filesystem::path scratch(const std::string& name) {
  const auto path = std::filesystem::path(testing::TempDir()) / ("spillway_" + name + "_" + std::to_string(::getpid()));
  std::filesystem::remove_all(path);
  return path;
}

}  // namespace spillway::test
