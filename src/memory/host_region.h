// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "spillway/core/units.h"

namespace spillway {

/// Pages of the host: bound to a NUMA node where one is named (a preference: without the right to bind, or room there,
/// memory is merely farther away), advised to huge pages, then touched, so that no page fault is left for a step.
/// Owns: the pages.
class HostRegion {
 public:
  /// `numa_node` below zero: not bound. Throws: OutOfMemory when the system has no more.
  HostRegion(Bytes size, int numa_node);
  ~HostRegion();
  HostRegion(const HostRegion&) = delete;
  HostRegion& operator=(const HostRegion&) = delete;

  /// Null where the size is 0.
  std::byte* base() const { return base_; }
  std::size_t size() const { return size_; }

 private:
  const std::size_t size_;
  std::byte* base_ = nullptr;
};

}  // namespace spillway
