// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <map>
#include <span>
#include <stdexcept>
#include <string>

namespace spillway::fuzz {

/// A folder of its own whose files are in memory: symbolic links that lead to memfds.
class InputFolder {
 public:
  InputFolder() {
    std::string folder = (std::filesystem::temp_directory_path() / "spillway-fuzz-XXXXXX").string();
    if (::mkdtemp(folder.data()) == nullptr) throw std::runtime_error("no place for the input files");
    path_ = folder;
  }
  ~InputFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
    for (const auto& [name, fd] : files_) ::close(fd);
  }
  InputFolder(const InputFolder&) = delete;
  InputFolder& operator=(const InputFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

  /// Makes or replaces a file; nothing may be open on it.
  std::filesystem::path put(const std::string& name, std::span<const std::byte> bytes) {
    const int fd = file(name);
    if (::ftruncate(fd, 0) != 0 || ::pwrite(fd, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
      throw std::runtime_error("the input file cannot be written");
    }
    return path_ / name;
  }
  void remove(const std::string& name) {
    const auto found = files_.find(name);
    if (found == files_.end()) return;
    std::filesystem::remove(path_ / name);
    ::close(found->second);
    files_.erase(found);
  }

 private:
  int file(const std::string& name) {
    const auto found = files_.find(name);
    if (found != files_.end()) return found->second;
    const int fd = ::memfd_create("spillway-fuzz", MFD_CLOEXEC);
    if (fd < 0) throw std::runtime_error("no memory for the input file");
    files_.emplace(name, fd);
    std::filesystem::create_symlink("/proc/self/fd/" + std::to_string(fd), path_ / name);
    return fd;
  }

  std::filesystem::path path_;
  std::map<std::string, int> files_;
};

}  // namespace spillway::fuzz
