// SPDX-License-Identifier: Apache-2.0
#include "formats/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/process_names.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

// Linux moves at most 2 GiB less a page in one call.
constexpr std::size_t kMostAtOnce = std::size_t{1} << 30;

constexpr std::string_view kSuffix = ".part";

std::string prefix_aside(const std::filesystem::path& target) {
  return fmt::format(".{}.", target.filename().string());
}

std::filesystem::path name_aside(const std::filesystem::path& target) {
  return target.parent_path() / fmt::format("{}{}{}", prefix_aside(target), process_name(), kSuffix);
}

// What writers of the same file left behind when they were killed. A folder that cannot be listed or cleaned is left as
// it is: the write itself says what is wrong with it.
void remove_leftovers(const std::filesystem::path& target) noexcept {
  try {
    const std::string prefix = prefix_aside(target);
    const std::filesystem::path folder = target.has_parent_path() ? target.parent_path() : ".";
    std::vector<std::filesystem::path> left;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with(prefix) || !name.ends_with(kSuffix) || name.size() < prefix.size() + kSuffix.size())
        continue;
      const auto middle = std::string_view(name).substr(prefix.size(), name.size() - prefix.size() - kSuffix.size());
      if (is_left_behind(middle)) left.push_back(entry.path());
    }
    for (const std::filesystem::path& file : left) ::unlink(file.c_str());
  } catch (const std::exception&) {
  }
}

}  // namespace

AtomicFile::AtomicFile(const std::filesystem::path& target) : target_(target) {
  remove_leftovers(target);
  const std::filesystem::path aside = name_aside(target);
  fd_ = ::open(aside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("cannot create a file beside it", errno);
  aside_ = aside;
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!aside_.empty()) ::unlink(aside_.c_str());
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : target_(std::move(other.target_)),
      aside_(std::move(other.aside_)),
      fd_(std::exchange(other.fd_, -1)),
      size_(other.size_),
      checksum_(std::move(other.checksum_)) {
  other.aside_.clear();
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  size_ += Bytes{static_cast<std::int64_t>(bytes.size())};
  checksum_.add(bytes);
  while (!bytes.empty()) {
    const ssize_t done = ::write(fd_, bytes.data(), std::min(bytes.size(), kMostAtOnce));
    if (done < 0) {
      if (errno == EINTR) continue;
      fail("cannot write", errno);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(done));
  }
}

void AtomicFile::finish() {
  if (::fsync(fd_) != 0) fail("cannot flush to disk", errno);
  if (::close(std::exchange(fd_, -1)) != 0) fail("cannot close", errno);
}

void AtomicFile::publish() {
  if (::rename(aside_.c_str(), target_.c_str()) != 0) fail("cannot rename into place", errno);
  aside_.clear();
  flush_folder(target_.parent_path());
}

void AtomicFile::fail(const char* what, int error) const {
  throw FileError(fmt::format("{}: {}: {}", target_.string(), what, std::strerror(error)));
}

void flush_folder(const std::filesystem::path& folder) {
  const int fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);  // EINVAL where the file system has no way to
  ::close(fd);
}

}  // namespace spillway
