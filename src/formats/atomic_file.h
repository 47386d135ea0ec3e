// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

#include "formats/checksum.h"
#include "spillway/core/units.h"

namespace spillway {

/// A file written aside (in the target's folder, under a hidden name) that appears under its own name all at once.
/// Owns: the file aside, which is removed unless `publish` succeeded. Throws: FileError with errno text.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& target);
  ~AtomicFile();
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;

  void write(std::span<const std::byte> bytes);

  /// Flushes the file to its disk and closes it; nothing can be written afterwards.
  void finish();

  /// Gives a finished file its name, replacing what is there, and flushes the folder.
  void publish();

  /// Of what was written so far.
  Bytes size() const { return size_; }
  std::uint64_t checksum() const { return checksum_.value(); }

  const std::filesystem::path& target() const { return target_; }

 private:
  [[noreturn]] void fail(const char* what, int error) const;

  std::filesystem::path target_;
  std::filesystem::path aside_;  // empty: nothing to remove
  int fd_ = -1;
  Bytes size_;
  Checksum checksum_;
};

/// Flushes a folder, and with it the names in it, to its disk, where its file system has a way to. Never throws: what
/// was renamed is renamed either way. An empty path: the current folder.
void flush_folder(const std::filesystem::path& folder);

}  // namespace spillway
