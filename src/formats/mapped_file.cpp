// SPDX-License-Identifier: Apache-2.0
#include "formats/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "spillway/core/error.h"

namespace spillway {
namespace {

[[noreturn]] void throw_errno(const std::filesystem::path& file, const char* what, int error) {
  throw FileError(fmt::format("{}: {}: {}", file.string(), what, std::strerror(error)));
}

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& file) : path_(file) {
  // O_NONBLOCK: opening a FIFO by mistake must fail below, not hang here.
  const Descriptor descriptor{::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (descriptor.fd < 0) throw_errno(file, "cannot open for reading", errno);
  struct stat status {};
  if (::fstat(descriptor.fd, &status) != 0) throw_errno(file, "cannot read its size", errno);
  if (!S_ISREG(status.st_mode)) throw FileError(fmt::format("{}: expected a regular file", file.string()));
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;
  data_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor.fd, 0);
  if (data_ == MAP_FAILED) {
    data_ = nullptr;
    throw_errno(file, "cannot map into memory", errno);
  }
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)), path_(std::move(other.path_)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(path_, other.path_);
  return *this;
}

}  // namespace spillway
