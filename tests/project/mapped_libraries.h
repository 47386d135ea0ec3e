// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

namespace spillway::test {

// The different shared libraries of these names that are mapped into this process, whatever follows the name:
// "libgomp" finds libgomp.so.1 and libgomp-a34b3233.so.1.
inline std::set<std::string> mapped(const std::vector<std::string>& names) {
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

inline std::string listed(const std::set<std::string>& files) {
  std::string text;
  for (const std::string& file : files) text += "\n  " + file;
  return text;
}

}  // namespace spillway::test
