// SPDX-License-Identifier: Apache-2.0
#include "spillway/memory/pool.h"

#include "memory/host_region.h"
#include "spillway/core/error.h"

namespace spillway {
namespace {

class HostArena final : public Arena {
 public:
  explicit HostArena(Bytes size) : region_(size, -1) {}
  std::byte* base() const override { return region_.base(); }

 private:
  HostRegion region_;
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
