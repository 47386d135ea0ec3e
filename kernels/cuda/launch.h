// SPDX-License-Identifier: Apache-2.0
#pragma once

// How a kernel's elements are shared out over threads. Plain functions of the host, so that they are tested without a
// GPU.

#include <cstdint>
#include <initializer_list>

#include "kernels/scalars.h"

#if defined(__CUDACC__)
#define SPILLWAY_SHARED __host__ __device__
#else
#define SPILLWAY_SHARED
#endif

namespace spillway::kernels::cuda {

constexpr int kThreads = 256;
// More blocks than any GPU holds at once; beyond that, threads go round.
constexpr std::int64_t kMostBlocks = 8192;
/// Elements that a thread reads and writes at once: 128 bits of fp32.
constexpr std::int64_t kQuad = 4;
constexpr std::int64_t kWarp = 32;

/// `head` single elements up to the first address that a whole quad may start at, `quads`, and single ones again.
struct Shares {
  std::int64_t head = 0;
  std::int64_t quads = 0;
  std::int64_t count = 0;

  SPILLWAY_SHARED std::int64_t singles() const { return count - kQuad * quads; }
  /// The first element of a quad, and the element that the i-th single one is.
  SPILLWAY_SHARED std::int64_t quad(std::int64_t i) const { return head + kQuad * i; }
  SPILLWAY_SHARED std::int64_t single(std::int64_t i) const { return i < head ? i : i + kQuad * quads; }
};

/// An array of a call; null ones do not count.
struct Array {
  const void* data = nullptr;
  std::int64_t element_bytes = 4;
};

inline std::int64_t element_bytes(Element type) {
  return type == Element::f32 ? 4 : 2;
}

/// Quads need all arrays to reach an aligned address at the same element. Where they do not, all elements are single.
inline Shares share_out(std::int64_t count, std::initializer_list<Array> arrays) {
  std::int64_t head = -1;
  for (const Array& array : arrays) {
    if (array.data == nullptr) continue;
    const auto address = reinterpret_cast<std::uintptr_t>(array.data);
    const auto element = static_cast<std::int64_t>(address / static_cast<std::uintptr_t>(array.element_bytes) % kQuad);
    const std::int64_t own = (kQuad - element) % kQuad;
    if (head >= 0 && own != head) return {0, 0, count};
    head = own;
  }
  if (head < 0 || count < head + kQuad) return {0, 0, count};
  return {head, (count - head) / kQuad, count};
}

/// Blocks of kThreads threads for so many items.
inline unsigned blocks_for(std::int64_t items) {
  const std::int64_t blocks = items / kThreads + (items % kThreads != 0 ? 1 : 0);
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > kMostBlocks ? kMostBlocks : blocks);
}

inline unsigned blocks_for(const Shares& shares) {
  return blocks_for(shares.quads > shares.singles() ? shares.quads : shares.singles());
}

}  // namespace spillway::kernels::cuda
