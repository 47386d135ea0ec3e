// SPDX-License-Identifier: Apache-2.0
#include "memory/host_region.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstring>

#include "spillway/core/error.h"

namespace spillway {
namespace {

// By system call: libnuma would be one more library for one line.
void prefer_node(void* region, std::size_t size, int node) {
#ifdef SYS_mbind
  constexpr int kPreferred = 1;  // MPOL_PREFERRED
  constexpr std::size_t kBits = sizeof(unsigned long) * CHAR_BIT;
  std::array<unsigned long, 16> nodes{};
  const auto bit = static_cast<std::size_t>(node);
  if (bit >= nodes.size() * kBits) return;
  nodes[bit / kBits] = 1UL << bit % kBits;
  syscall(SYS_mbind, region, size, kPreferred, nodes.data(), nodes.size() * kBits, 0);
#else
  static_cast<void>(region), static_cast<void>(size), static_cast<void>(node);
#endif
}

}  // namespace

HostRegion::HostRegion(Bytes size, int numa_node) : size_(static_cast<std::size_t>(size.value)) {
  if (size_ == 0) return;
  void* region = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (region == MAP_FAILED) {
    throw OutOfMemory(
        fmt::format("the system has no {} of host memory left: {}", to_string(size), std::strerror(errno)), size.value,
        size.value);
  }
  base_ = static_cast<std::byte*>(region);
  if (numa_node >= 0) prefer_node(region, size_, numa_node);
  madvise(region, size_, MADV_HUGEPAGE);  // advice only: without huge pages it is merely slower
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (std::size_t i = 0; i < size_; i += page) static_cast<volatile std::byte*>(base_)[i] = std::byte{0};
}

HostRegion::~HostRegion() {
  if (base_ != nullptr) munmap(base_, size_);
}

}  // namespace spillway
