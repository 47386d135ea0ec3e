// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>

#include "runtime/control_groups.h"
#include "spillway/runtime/machine.h"

namespace spillway {
namespace {

namespace fs = std::filesystem;

std::optional<std::int64_t> number_in(const fs::path& file) {
  std::ifstream stream(file);
  std::int64_t number = 0;
  if (stream >> number) return number;
  return std::nullopt;  // no such file, or "max"
}

std::int64_t value_in(const fs::path& file, const std::string& wanted) {
  std::ifstream stream(file);
  std::string name;
  for (std::int64_t value = 0; stream >> name >> value;) {
    if (name == wanted) return value;
  }
  return 0;
}

/// What a group may still take. Cached files count as used by it, but the system drops them before it refuses memory.
std::optional<std::int64_t> left_in(const fs::path& group) {
  const bool second = fs::exists(group / "memory.max");
  const auto limit = number_in(group / (second ? "memory.max" : "memory.limit_in_bytes"));
  const auto used = number_in(group / (second ? "memory.current" : "memory.usage_in_bytes"));
  if (!limit || !used) return std::nullopt;
  const std::string prefix = second ? "" : "total_";  // version 1 has both: of the group alone, and with those below
  const std::int64_t cached = value_in(group / "memory.stat", prefix + "inactive_file") +
                              value_in(group / "memory.stat", prefix + "active_file");
  return std::max<std::int64_t>(0, *limit - std::max<std::int64_t>(0, *used - cached));
}

}  // namespace

std::optional<Bytes> available_host_memory(const fs::path& root) {
  std::optional<Bytes> available;
  std::ifstream system(root / "proc/meminfo");
  for (std::string line; std::getline(system, line);) {
    long long kibibytes = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %lld kB", &kibibytes) == 1) available = Bytes{kibibytes * 1024};
  }
  if (!available) return available;
  for (const fs::path& group : control_groups(root, "memory")) {
    if (const auto left = left_in(group)) available = std::min(*available, Bytes{*left});
  }
  return available;
}

}  // namespace spillway
