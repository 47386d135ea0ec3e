// SPDX-License-Identifier: Apache-2.0
#include "spillway/memory/pool.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "spillway/core/error.h"

namespace spillway {
namespace {

class HostArena final : public Arena {
 public:
  explicit HostArena(Bytes size) : size_(static_cast<std::size_t>(size.value)) {
    if (size_ == 0) return;
    void* region = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (region == MAP_FAILED) {
      throw OutOfMemory(
          fmt::format("the system has no {} of host memory left: {}", to_string(size), std::strerror(errno)),
          size.value, size.value);
    }
    base_ = static_cast<std::byte*>(region);
    madvise(region, size_, MADV_HUGEPAGE);  // advice only: without huge pages it is merely slower
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    for (std::size_t i = 0; i < size_; i += page) static_cast<volatile std::byte*>(base_)[i] = std::byte{0};
  }
  ~HostArena() override {
    if (base_ != nullptr) munmap(base_, size_);
  }
  std::byte* base() const override { return base_; }

 private:
  std::size_t size_;
  std::byte* base_ = nullptr;
};

}  // namespace

View View::slice(Bytes offset, Bytes count) const {
  check(offset.value >= 0 && count.value >= 0 && offset + count <= size, "a slice lies inside its view");
  return {data == nullptr ? nullptr : data + offset.value, count, tier};
}

std::unique_ptr<Arena> make_host_arena(Bytes size) {
  return std::make_unique<HostArena>(size);
}

Bytes Pool::padded(Bytes bytes) {
  return {(bytes.value + kAlignment.value - 1) / kAlignment.value * kAlignment.value};
}

Pool::Pool(MemoryLedger& ledger, std::unique_ptr<Arena> arena, Bytes size)
    : ledger_(ledger), arena_(std::move(arena)), size_(size) {}

Pool::~Pool() {
  for (int i = 0; i < kMemoryUses; ++i) {
    const auto use = static_cast<MemoryUse>(i);
    ledger_.release(use, charged_[use]);
  }
}

View Pool::allocate(Bytes bytes, MemoryUse use) {
  const Bytes rounded = padded(bytes);
  check(rounded <= size_ - offset_, "a pool holds what was planned for it");
  ledger_.charge(use, rounded);
  charged_[use] += rounded;
  std::byte* base = arena_->base();
  const View view{base == nullptr ? nullptr : base + offset_.value, bytes, ledger_.tier()};
  offset_ += rounded;
  return view;
}

Tier Pool::tier() const {
  return ledger_.tier();
}

}  // namespace spillway
