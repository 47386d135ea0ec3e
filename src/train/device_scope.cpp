// SPDX-License-Identifier: Apache-2.0
#include "spillway/train/device_scope.h"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

namespace spillway {

/// One scope's count. Kept alive by the scope and by every allocation made in it.
struct DeviceScope::Account {
  explicit Account(std::shared_ptr<MemoryLedger> to) : ledger(std::move(to)) {}
  const std::shared_ptr<MemoryLedger> ledger;
  std::atomic<bool> open{true};
};

namespace {

// Scopes of this thread, the newest last; an empty entry is a HostScope. Accounts of scopes that were ended by another
// thread are dropped when they come to the top.
template <class Account>
std::vector<std::shared_ptr<Account>>& scope_stack() {
  thread_local std::vector<std::shared_ptr<Account>> stack;
  return stack;
}

}  // namespace

/// LibTorch's CPU allocator with a header before each piece that says what it was counted on.
class CountingAllocator final : public c10::Allocator {
 public:
  static void install() {
    // Never destroyed: tensors in static storage are freed after everything else.
    static auto* const allocator = [] {
      auto* made = new CountingAllocator;
      c10::SetAllocator(c10::kCPU, made, 1);
      return made;
    }();
    static_cast<void>(allocator);
  }

  c10::DataPtr allocate(std::size_t n) override {
    if (n == 0) return {nullptr, nullptr, &deallocate, c10::kCPU};
    std::shared_ptr<DeviceScope::Account> account = current();
    if (account) account->ledger->charge(MemoryUse::activations, {static_cast<std::int64_t>(n)});
    void* block = std::aligned_alloc(kAlignment, (n + kAlignment - 1) / kAlignment * kAlignment + kAlignment);
    if (block == nullptr) {
      if (account) account->ledger->release(MemoryUse::activations, {static_cast<std::int64_t>(n)});
      throw std::bad_alloc();
    }
    new (block) Header{std::move(account), n};
    void* data = static_cast<std::byte*>(block) + kAlignment;
    return {data, data, &deallocate, c10::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }

  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }

 private:
  struct Header {
    std::shared_ptr<DeviceScope::Account> account;
    std::size_t bytes;
  };
  static constexpr std::size_t kAlignment = 64;  // LibTorch's kernels expect it of CPU memory
  static_assert(sizeof(Header) <= kAlignment);

  static std::shared_ptr<DeviceScope::Account> current() {
    auto& stack = scope_stack<DeviceScope::Account>();
    while (!stack.empty() && stack.back() && !stack.back()->open) stack.pop_back();
    return stack.empty() ? nullptr : stack.back();
  }

  static void deallocate(void* data) {
    if (data == nullptr) return;
    auto* header = std::launder(reinterpret_cast<Header*>(static_cast<std::byte*>(data) - kAlignment));
    if (header->account) {
      header->account->ledger->release(MemoryUse::activations, {static_cast<std::int64_t>(header->bytes)});
    }
    header->~Header();
    std::free(header);
  }
};

DeviceScope::DeviceScope(std::shared_ptr<MemoryLedger> ledger)
    : account_(std::make_shared<Account>(std::move(ledger))) {
  CountingAllocator::install();
  scope_stack<Account>().push_back(account_);
}

DeviceScope::~DeviceScope() {
  account_->open = false;
  auto& stack = scope_stack<Account>();
  stack.erase(std::remove(stack.begin(), stack.end(), account_), stack.end());
}

HostScope::HostScope() {
  scope_stack<DeviceScope::Account>().emplace_back();
}

HostScope::~HostScope() {
  // The newest empty entry: a device scope opened meanwhile may stand above it.
  auto& stack = scope_stack<DeviceScope::Account>();
  const auto mine = std::find(stack.rbegin(), stack.rend(), nullptr);
  if (mine != stack.rend()) stack.erase(std::next(mine).base());
}

}  // namespace spillway
