// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "spillway/memory/ledger.h"

namespace spillway {

/// While it lives, what LibTorch allocates on the CPU from the thread that made it counts as activations against
/// `ledger`: the emulated device's memory. Exceeding its capacity throws OutOfMemory out of the LibTorch call.
///
/// The first scope installs Spillway's CPU allocator for the whole process, for good (LibTorch cannot take one back).
/// Tensors without memory (torch::kMeta) count too, as much as they would take.
/// Tensors may outlive the scope and be freed by any thread; they count until then.
/// Order: scopes of a thread may end in any order; the newest one that is left counts.
class DeviceScope {
 public:
  explicit DeviceScope(std::shared_ptr<MemoryLedger> ledger);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  struct Account;
  friend class HostScope;
  friend class CountingScope;
  std::shared_ptr<Account> account_;
};

/// While it lives, allocations of its thread are ordinary host memory again: for data loading, logging, evaluation on
/// the host. Order: scopes of this kind end in reverse order.
class HostScope {
 public:
  /// Whether one is the calling thread's newest scope.
  static bool is_newest();
  HostScope();
  ~HostScope();
  HostScope(const HostScope&) = delete;
  HostScope& operator=(const HostScope&) = delete;
};

}  // namespace spillway
