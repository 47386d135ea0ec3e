// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/memory/ledger.h"
#include "spillway/memory/pool.h"

namespace spillway {
namespace {

TEST(MemoryLedger, RefusesWhatDoesNotFitAndSaysWhatIsThere) {
  MemoryLedger ledger(Tier::device, Bytes{1000});
  ledger.charge(MemoryUse::parameters, Bytes{600});
  ledger.charge(MemoryUse::activations, Bytes{300});
  try {
    ledger.charge(MemoryUse::activations, Bytes{150});
    FAIL() << "more than the capacity was accepted";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.requested(), 150);
    EXPECT_EQ(error.missing(), 50);
    const std::string text = error.what();
    for (const char* part : {"device", "150 B", "activations", "100 B of 1000 B", "parameters 600 B",
                             "activations 300 B", "50 B are missing"}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
    }
  }
  EXPECT_EQ(ledger.used().total().value, 900);
  ledger.charge(MemoryUse::activations, Bytes{100});  // exactly full
}

TEST(MemoryLedger, KeepsThePeakAndWhatMadeIt) {
  MemoryLedger ledger(Tier::pinned, Bytes{-1});
  ledger.charge(MemoryUse::masters, Bytes{10});
  ledger.charge(MemoryUse::staging, Bytes{5});
  ledger.release(MemoryUse::staging, Bytes{5});
  ledger.charge(MemoryUse::gradients, Bytes{2});
  EXPECT_EQ(ledger.peak().value, 15);
  EXPECT_EQ(ledger.usage_at_peak()[MemoryUse::staging].value, 5);
  EXPECT_EQ(ledger.usage_at_peak()[MemoryUse::gradients].value, 0);
  ledger.reset_peak();
  EXPECT_EQ(ledger.peak().value, 12);
  EXPECT_FALSE(ledger.limited());
}

TEST(MemoryLedger, CountsFromSeveralThreads) {
  MemoryLedger ledger(Tier::device, Bytes{-1});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        ledger.charge(MemoryUse::activations, Bytes{8});
        if (i % 2) ledger.release(MemoryUse::activations, Bytes{16});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ledger.used().total().value, 0);
}

TEST(Pool, GivesAlignedDisjointPiecesAndChargesTheLedger) {
  MemoryLedger ledger(Tier::pinned, Bytes{-1});
  {
    Pool pool(ledger, make_host_arena(Bytes{4096}), Bytes{4096});
    const View a = pool.allocate(Bytes{100}, MemoryUse::masters), b = pool.allocate(Bytes{513}, MemoryUse::staging);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data) % 512, 0U);
    EXPECT_EQ(b.data - a.data, 512);
    EXPECT_EQ(b.size.value, 513);
    EXPECT_EQ(ledger.used()[MemoryUse::masters].value, 512);
    EXPECT_EQ(ledger.used()[MemoryUse::staging].value, 1024);
    EXPECT_THROW(pool.allocate(Bytes{4096}, MemoryUse::masters), InternalError);
    EXPECT_EQ(ledger.used().total().value, 1536);
    for (std::int64_t i = 0; i < b.size.value; ++i) b.data[i] = std::byte{1};  // writable to its end
  }
  EXPECT_EQ(ledger.used().total().value, 0);
}

TEST(View, SlicesStayInside) {
  std::byte bytes[16];
  const View view{bytes, Bytes{16}, Tier::host};
  EXPECT_EQ(view.slice(Bytes{4}, Bytes{12}).data, bytes + 4);
  EXPECT_EQ(view.slice(Bytes{16}, Bytes{0}).size.value, 0);
  EXPECT_THROW(view.slice(Bytes{4}, Bytes{13}), InternalError);
  EXPECT_THROW(view.slice(Bytes{-1}, Bytes{2}), InternalError);
}

}  // namespace
}  // namespace spillway
