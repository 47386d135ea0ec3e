// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace spillway::test {

/// What the system tells of a host, below a folder of its own that goes away with its object.
class HostFolder {
 public:
  HostFolder() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    root_ = std::filesystem::temp_directory_path() /
            ("spillway_host_" + std::string(info->name()) + std::to_string(::getpid()));
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
  }
  ~HostFolder() { std::filesystem::remove_all(root_); }
  HostFolder(const HostFolder&) = delete;
  HostFolder& operator=(const HostFolder&) = delete;

  const std::filesystem::path& root() const { return root_; }
  void write(const std::filesystem::path& file, const std::string& text) {
    std::filesystem::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text << "\n";
  }

 private:
  std::filesystem::path root_;
};

}  // namespace spillway::test
