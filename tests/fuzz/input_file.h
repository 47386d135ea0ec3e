// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>

namespace spillway::fuzz {

/// A file in memory with a name of choice: a symbolic link in a folder of its own that leads to a memfd.
class InputFile {
 public:
  explicit InputFile(const std::string& name) : fd_(::memfd_create("spillway-fuzz", MFD_CLOEXEC)) {
    std::string folder = (std::filesystem::temp_directory_path() / "spillway-fuzz-XXXXXX").string();
    if (fd_ < 0 || ::mkdtemp(folder.data()) == nullptr) throw std::runtime_error("no place for the input file");
    folder_ = folder;
    file_ = folder_ / name;
    std::filesystem::create_symlink("/proc/self/fd/" + std::to_string(fd_), file_);
  }
  ~InputFile() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
    ::close(fd_);
  }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  /// Replaces the content; nothing may be open on the file.
  const std::filesystem::path& fill(std::span<const std::byte> bytes) {
    if (::ftruncate(fd_, 0) != 0 ||
        ::pwrite(fd_, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
      throw std::runtime_error("the input file cannot be written");
    }
    return file_;
  }

 private:
  int fd_;
  std::filesystem::path folder_;
  std::filesystem::path file_;
};

}  // namespace spillway::fuzz
