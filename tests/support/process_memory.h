// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

namespace spillway::test {

// A sanitizer keeps notes on every byte of the process, in memory too.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kProcessMemoryIsMeasurable = false;
#else
inline constexpr bool kProcessMemoryIsMeasurable = true;
#endif

/// Bytes of this process in memory that are its own: mapped files, which the system may drop at any time, left out.
inline std::int64_t own_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (std::int64_t kilobytes = 0; word == "RssAnon:" && status >> kilobytes) return kilobytes * 1024;
  }
  return std::numeric_limits<std::int64_t>::max();
}

inline std::int64_t open_descriptors() {
  std::int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

/// Whether a file under `folder` is still mapped, removed or not.
inline bool is_mapped(const std::filesystem::path& folder) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find(folder.string()) != std::string::npos) return true;
  }
  return false;
}

}  // namespace spillway::test
