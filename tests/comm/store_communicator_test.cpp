// SPDX-License-Identifier: Apache-2.0
// What ranks with GPUs tell each other beside NCCL: small exchanges, comparison of calls, failures.
#include "comm/store_communicator.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "comm/verbs.h"
#include "spillway/core/error.h"
#include "support/contains.h"

namespace spillway {
namespace {

using test::contains;

class MapStore final : public Store {
 public:
  void set(const std::string& key, std::span<const std::byte> value) override {
    const std::scoped_lock lock(mutex_);
    values_[key] = {value.begin(), value.end()};
  }
  std::optional<std::vector<std::byte>> find(const std::string& key) override {
    const std::scoped_lock lock(mutex_);
    const auto found = values_.find(key);
    if (found == values_.end()) return std::nullopt;
    return found->second;
  }
  void erase(const std::string& key) override {
    const std::scoped_lock lock(mutex_);
    values_.erase(key);
  }
  std::size_t size() const { return values_.size(); }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<std::byte>> values_;
};

// Its verbs move nothing: on a GPU they are NCCL's.
class StoreRank final : public StoreCommunicator {
 public:
  StoreRank(int rank, int size, Store& store, const CommOptions& options)
      : StoreCommunicator({rank, size, rank, size}, store, "test", options) {
    const std::array<std::byte, 2> id = {std::byte{7}, static_cast<std::byte>(rank)};
    const std::vector<std::byte> shared = share("id", id);
    require(shared.size() == 2 && shared[0] == std::byte{7} && shared[1] == std::byte{0}, "the id is that of rank 0");
  }
  ~StoreRank() override { end_together(); }
  std::string_view transport() const override { return "store"; }
  using StoreCommunicator::announced_failure;

 private:
  void carry(Channel, std::span<const Send>, std::span<const Receive>, StreamRef) override {}
  void sum_scatter(std::span<const ScatterChunk>, DType, StreamRef) override {}
  void sum_all(std::span<const SumRun>, DType, StreamRef) override {}
};

std::vector<std::string> run_ranks(int size, MapStore& store, const std::function<void(Communicator&)>& body,
                                   CommOptions options = {}) {
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        StoreRank comm(rank, size, store, options);
        body(comm);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

TEST(StoreCommunicator, EachOfOneStoreHasKeysOfItsOwn) {
  MapStore store;
  Launch launch;
  launch.rank = 1;
  const std::string first = next_prefix(store, launch), second = next_prefix(store, launch);
  EXPECT_NE(first, second);
  launch.rank = 0;  // the other ranks' first is the same one
  EXPECT_EQ(next_prefix(store, launch), first);
  EXPECT_EQ(next_prefix(store, launch), second);
  launch.attempt = 2;
  const std::string restarted = next_prefix(store, launch);
  EXPECT_NE(restarted, first);
  EXPECT_NE(restarted, second);
}

TEST(StoreCommunicator, DoesSmallExchangesAndLeavesFewKeysBehind) {
  for (const int ranks : {1, 2, 3}) {
    MapStore store;
    const auto errors = run_ranks(ranks, store, [](Communicator& comm) {
      for (const test::VerbCase& each : test::verb_cases()) {
        if (each.name == "small") {
          for (int round = 0; round < 20; ++round) each.body(comm);
        }
      }
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
    EXPECT_LE(store.size(), static_cast<std::size_t>(7 * ranks));  // of the last two calls, the id, and the farewells
  }
}

TEST(StoreCommunicator, ComparesCallsWhereAsked) {
  const auto body = [](Communicator& comm) {
    std::array<float, 4> values{};
    const SumRun run{values.data(), comm.rank() == 0 ? 4 : 3};
    comm.all_reduce({"gradients"}, {&run, 1}, DType::f32);
  };
  MapStore store, unchecked;
  CommOptions options;
  for (const std::string& error : run_ranks(2, unchecked, body, options)) EXPECT_EQ(error, "");
  options.check_calls = true;
  for (const std::string& error : run_ranks(2, store, body, options)) {
    EXPECT_TRUE(contains(error, {"rank 0 ", "rank 1 ", "all_reduce of fp32 \"gradients\"", "16 bytes", "12 bytes"}));
  }
}

TEST(StoreCommunicator, AFailureReachesThoseWhoWait) {
  MapStore store;
  const auto errors = run_ranks(3, store, [](Communicator& comm) {
    if (comm.rank() == 1) throw std::runtime_error("the GPU has gone");
    comm.barrier({"step"});
  });
  EXPECT_EQ(errors[1], "the GPU has gone");
  for (const std::size_t rank : {0, 2}) EXPECT_TRUE(contains(errors[rank], {"rank 1 failed", "barrier \"step\""}));
}

TEST(StoreCommunicator, TimesOutNamingTheMissing) {
  MapStore store;
  CommOptions options;
  options.timeout = Seconds{0.2};
  std::atomic<bool> done{false};
  const auto errors = run_ranks(
      2, store,
      [&](Communicator& comm) {
        if (comm.rank() == 1) {
          while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          return;
        }
        try {
          comm.barrier({"step", 4});
        } catch (...) {
          done = true;
          throw;
        }
      },
      options);
  EXPECT_TRUE(contains(errors[0], {"rank 0 of 2 has waited ", "barrier \"step\" [4]", "for rank 1"}));
}

TEST(StoreCommunicator, AFailureIsSeenByWhoeverAsks) {
  MapStore store;
  StoreRank other(0, 2, store, {});
  StoreRank failing(1, 2, store, {});
  EXPECT_EQ(other.announced_failure(), "");
  failing.fail("no memory is left");
  EXPECT_EQ(other.announced_failure(), "rank 1 failed: no memory is left");
}

}  // namespace
}  // namespace spillway
