// SPDX-License-Identifier: Apache-2.0
#include "runtime/control_groups.h"

#include <fmt/format.h>

#include <fstream>
#include <string>

namespace spillway {

namespace fs = std::filesystem;

std::vector<fs::path> control_groups(const fs::path& root, std::string_view controller) {
  std::vector<fs::path> folders;
  const auto add = [&](const fs::path& mount, fs::path group) {
    while (true) {
      folders.push_back(root / mount / group.relative_path());
      if (group.relative_path().empty()) return;
      group = group.parent_path();
    }
  };
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/path" or "4:cpu,cpuacct:/path"
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (controllers.empty()) add("sys/fs/cgroup", path);
    if (fmt::format(",{},", controllers).find(fmt::format(",{},", controller)) == std::string::npos) continue;
    add(fs::path("sys/fs/cgroup") / controller, path);
    if (controllers != controller) add(fs::path("sys/fs/cgroup") / controllers, path);
  }
  add("sys/fs/cgroup", "/");
  return folders;
}

}  // namespace spillway
