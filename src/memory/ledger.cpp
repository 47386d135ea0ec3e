// SPDX-License-Identifier: Apache-2.0
#include "spillway/memory/ledger.h"

#include <fmt/format.h>

#include "spillway/core/error.h"

namespace spillway {

std::string_view to_string(Tier tier) {
  switch (tier) {
    case Tier::device:
      return "device";
    case Tier::pinned:
      return "pinned";
    case Tier::host:
      return "host";
    case Tier::file:
      return "file";
  }
  return "unknown";
}

std::string_view to_string(MemoryUse use) {
  switch (use) {
    case MemoryUse::parameters:
      return "parameters";
    case MemoryUse::gradients:
      return "gradients";
    case MemoryUse::masters:
      return "masters";
    case MemoryUse::optimizer_states:
      return "optimizer states";
    case MemoryUse::staging:
      return "staging";
    case MemoryUse::activations:
      return "activations";
  }
  return "unknown";
}

Bytes MemoryUsage::total() const {
  Bytes sum;
  for (Bytes bytes : by_use) sum += bytes;
  return sum;
}

std::string to_string(const MemoryUsage& usage) {
  std::string out;
  for (int i = 0; i < kMemoryUses; ++i) {
    const auto use = static_cast<MemoryUse>(i);
    if (usage[use].value == 0) continue;
    out += fmt::format("{}{} {}", out.empty() ? "" : ", ", to_string(use), to_string(usage[use]));
  }
  return out.empty() ? "nothing" : out;
}

MemoryLedger::MemoryLedger(Tier tier, Bytes capacity) : tier_(tier), capacity_(capacity) {}

void MemoryLedger::charge(MemoryUse use, Bytes bytes) {
  const std::scoped_lock lock(mutex_);
  if (enforced_ && limited() && bytes > capacity_ - total_) {
    const Bytes left = capacity_ - total_;
    throw OutOfMemory(
        fmt::format("out of {} memory: {} asked for {}, but {} of {} are left (in use: {}); {} are missing",
                    to_string(tier_), to_string(bytes), to_string(use), to_string(left), to_string(capacity_),
                    to_string(used_), to_string(bytes - left)),
        bytes.value, (bytes - left).value);
  }
  used_[use] += bytes;
  total_ += bytes;
  if (total_ > peak_) {
    peak_ = total_;
    at_peak_ = used_;
  }
}

void MemoryLedger::release(MemoryUse use, Bytes bytes) noexcept {
  const std::scoped_lock lock(mutex_);
  used_[use] -= bytes;
  total_ -= bytes;
}

MemoryUsage MemoryLedger::used() const {
  const std::scoped_lock lock(mutex_);
  return used_;
}

Bytes MemoryLedger::peak() const {
  const std::scoped_lock lock(mutex_);
  return peak_;
}

MemoryUsage MemoryLedger::usage_at_peak() const {
  const std::scoped_lock lock(mutex_);
  return at_peak_;
}

MemoryLedger::Unlimited::Unlimited(MemoryLedger& ledger) : ledger_(ledger) {
  const std::scoped_lock lock(ledger_.mutex_);
  ledger_.enforced_ = false;
}

MemoryLedger::Unlimited::~Unlimited() {
  const std::scoped_lock lock(ledger_.mutex_);
  ledger_.enforced_ = true;
}

void MemoryLedger::reset_peak() {
  const std::scoped_lock lock(mutex_);
  peak_ = total_;
  at_peak_ = used_;
}

}  // namespace spillway
