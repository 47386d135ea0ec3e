// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <mutex>
#include <string>
#include <string_view>

#include "spillway/core/units.h"

namespace spillway {

/// Where bytes live.
enum class Tier : unsigned char { device, pinned, host, file };
std::string_view to_string(Tier tier);

/// What bytes are for: the rows of every memory report.
enum class MemoryUse : unsigned char {
  parameters,        // the working copy that forward and backward read
  gradients,         // accumulated gradients
  masters,           // fp32 weights kept beside a working copy
  optimizer_states,  // moments
  staging,           // slots that transfers pass through
  activations,       // everything LibTorch allocates while it computes
};
inline constexpr int kMemoryUses = 6;
std::string_view to_string(MemoryUse use);

/// Bytes by use: one row of a memory plan or report.
struct MemoryUsage {
  std::array<Bytes, kMemoryUses> by_use{};

  Bytes& operator[](MemoryUse use) { return by_use[static_cast<std::size_t>(use)]; }
  Bytes operator[](MemoryUse use) const { return by_use[static_cast<std::size_t>(use)]; }
  Bytes total() const;
  bool operator==(const MemoryUsage&) const = default;
};

/// "parameters 40.0 MiB, staging 4.00 MiB": the uses that are not zero.
std::string to_string(const MemoryUsage& usage);

/// Counts the bytes of one tier against its capacity: the one place that says whether something still fits.
/// Threads: safe.
class MemoryLedger {
 public:
  /// `capacity` below zero: unlimited.
  MemoryLedger(Tier tier, Bytes capacity);
  MemoryLedger(const MemoryLedger&) = delete;
  MemoryLedger& operator=(const MemoryLedger&) = delete;

  /// Counts `bytes` as in use. Throws: OutOfMemory that says what was asked for what, the capacity, what each use
  /// holds, and how much would fit; then nothing is counted.
  void charge(MemoryUse use, Bytes bytes);
  /// Takes back bytes charged before.
  void release(MemoryUse use, Bytes bytes) noexcept;

  Tier tier() const { return tier_; }
  Bytes capacity() const { return capacity_; }
  bool limited() const { return capacity_.value >= 0; }
  MemoryUsage used() const;
  /// The most that was in use at one time since the start or the last reset_peak().
  Bytes peak() const;
  /// What each use held at the moment of that peak.
  MemoryUsage usage_at_peak() const;
  /// Starts a new peak at what is in use now.
  void reset_peak();

  /// While it lives, nothing is refused: for measuring how much a run would need. Threads: one at a time.
  class Unlimited {
   public:
    explicit Unlimited(MemoryLedger& ledger);
    ~Unlimited();
    Unlimited(const Unlimited&) = delete;
    Unlimited& operator=(const Unlimited&) = delete;

   private:
    MemoryLedger& ledger_;
  };

 private:
  const Tier tier_;
  const Bytes capacity_;
  bool enforced_ = true;
  mutable std::mutex mutex_;
  MemoryUsage used_;
  Bytes total_;
  MemoryUsage at_peak_;
  Bytes peak_;
};

}  // namespace spillway
