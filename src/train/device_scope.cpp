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

/// What both allocators share: which account a piece of memory counts on.
class CountingScope {
 public:
  struct Header {
    std::shared_ptr<DeviceScope::Account> account;
    std::size_t bytes;
  };

  /// Charges the account of this thread's newest scope, if there is one. Throws: OutOfMemory.
  static Header charge(std::size_t bytes) {
    Header header{current(), bytes};
    if (header.account) {
      header.account->ledger->charge(MemoryUse::activations, {static_cast<std::int64_t>(bytes)});
    }
    return header;
  }
  static void release(const Header& header) noexcept {
    if (!header.account) return;
    header.account->ledger->release(MemoryUse::activations, {static_cast<std::int64_t>(header.bytes)});
  }

 private:
  static std::shared_ptr<DeviceScope::Account> current() {
    auto& stack = scope_stack<DeviceScope::Account>();
    while (!stack.empty() && stack.back() && !stack.back()->open) stack.pop_back();
    return stack.empty() ? nullptr : stack.back();
  }
};

/// The allocator of tensors without memory: they count as if they had it, so that a run on them measures a real one.
class CountingMetaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t n) override {
    auto* header = new CountingScope::Header(CountingScope::charge(n));
    return {nullptr, header, &deallocate, c10::Device(c10::kMeta)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override {}

 private:
  static void deallocate(void* context) {
    auto* header = static_cast<CountingScope::Header*>(context);
    if (header == nullptr) return;
    CountingScope::release(*header);
    delete header;
  }
};

/// LibTorch's CPU allocator with a header before each piece that says what it was counted on.
class CountingAllocator final : public c10::Allocator {
 public:
  static void install() {
    // Never destroyed: tensors in static storage are freed after everything else.
    static auto* const allocator = [] {
      auto* made = new CountingAllocator;
      c10::SetAllocator(c10::kCPU, made, 1);
      c10::SetAllocator(c10::kMeta, new CountingMetaAllocator, 1);
      return made;
    }();
    static_cast<void>(allocator);
  }

  c10::DataPtr allocate(std::size_t n) override {
    if (n == 0) return {nullptr, nullptr, &deallocate, c10::kCPU};
    CountingScope::Header header = CountingScope::charge(n);
    void* block = std::aligned_alloc(kAlignment, (n + kAlignment - 1) / kAlignment * kAlignment + kAlignment);
    if (block == nullptr) {
      CountingScope::release(header);
      throw std::bad_alloc();
    }
    new (block) Header(std::move(header));
    void* data = static_cast<std::byte*>(block) + kAlignment;
    return {data, data, &deallocate, c10::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }

  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }

 private:
  using Header = CountingScope::Header;
  static constexpr std::size_t kAlignment = 64;  // LibTorch's kernels expect it of CPU memory
  static_assert(sizeof(Header) <= kAlignment);

  static void deallocate(void* data) {
    if (data == nullptr) return;
    auto* header = std::launder(reinterpret_cast<Header*>(static_cast<std::byte*>(data) - kAlignment));
    CountingScope::release(*header);
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

bool HostScope::is_newest() {
  const auto& stack = scope_stack<DeviceScope::Account>();
  return !stack.empty() && !stack.back();
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
