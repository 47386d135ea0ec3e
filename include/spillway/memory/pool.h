// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "spillway/core/units.h"
#include "spillway/memory/ledger.h"

namespace spillway {

/// Bytes that someone else owns.
struct View {
  std::byte* data = nullptr;
  Bytes size;
  Tier tier = Tier::host;

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
  /// Bytes [offset, offset + count) of this view. Throws: InternalError when they are not inside.
  View slice(Bytes offset, Bytes count) const;
};

/// One contiguous region obtained from the machine at birth and returned at death. What a machine implements.
class Arena {
 public:
  virtual ~Arena() = default;
  /// Null where nothing is held (planning).
  virtual std::byte* base() const = 0;
};

/// Ordinary memory, advised to huge pages and touched once here, so that no page fault is left for a step.
/// Throws: OutOfMemory when the system has no more.
std::unique_ptr<Arena> make_host_arena(Bytes size);

/// Memory of a fixed size at birth, given out in aligned pieces; nothing is allocated afterwards. Pieces are returned
/// all at once, with the pool: state lives as long as its engine.
/// Owns: its arena; charges the ledger, which must outlive it, piece by piece, so that a report shows each use.
/// Threads: one at a time.
class Pool {
 public:
  /// Every piece starts at a multiple of this: LibTorch's kernels choose by alignment, so the chunk size must not
  /// decide it.
  static constexpr Bytes kAlignment{512};
  /// `bytes` rounded up to kAlignment: what a piece costs a pool.
  static Bytes padded(Bytes bytes);

  Pool(MemoryLedger& ledger, std::unique_ptr<Arena> arena, Bytes size);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  /// Throws: InternalError when the pool was planned too small: plans and pools come from one calculation.
  View allocate(Bytes bytes, MemoryUse use);

  Tier tier() const;
  Bytes size() const { return size_; }
  Bytes allocated() const { return offset_; }

 private:
  MemoryLedger& ledger_;
  std::unique_ptr<Arena> arena_;
  const Bytes size_;
  Bytes offset_;
  MemoryUsage charged_;
};

}  // namespace spillway
