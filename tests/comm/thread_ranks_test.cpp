// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "spillway/core/error.h"
#include "support/contains.h"
#include "support/ranks.h"

namespace spillway {
namespace {

using test::contains;
using test::RankErrors;
using test::run_ranks;

std::span<const std::byte> bytes(const std::int64_t& value) {
  return std::as_bytes(std::span(&value, 1));
}

TEST(ThreadRanks, KnowTheirPlace) {
  std::atomic<int> seen{0};
  const RankErrors errors = run_ranks(3, [&](Communicator& comm) {
    require(comm.size() == 3 && comm.local_size() == 3 && comm.local_rank() == comm.rank(), "place");
    require(comm.transport() == "threads" && !comm.uses_stream(), "kind");
    seen += 1 << comm.rank();
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  EXPECT_EQ(seen, 7);
}

TEST(ThreadRanks, BelowOneIsRefused) {
  EXPECT_THROW(make_thread_ranks(0), InvalidArgument);
  EXPECT_THROW(make_thread_ranks(2, {.timeout = Seconds{0}}), InvalidArgument);
}

// ---- disagreement
// ----------------------------------------------------------------------------------------------------

TEST(Disagreement, InTheVerbIsToldToAllRanksNamingBothSides) {
  const RankErrors errors = run_ranks(3, [](Communicator& comm) {
    std::array<float, 4> values{};
    const SumRun run{values.data(), 4};
    comm.barrier({"start"});
    if (comm.rank() == 2) {
      comm.broadcast({"weights"}, values.data(), {16}, 0);
    } else {
      comm.all_reduce({"gradients", 5}, {&run, 1}, DType::f32);
    }
  });
  for (const std::string& error : errors) {
    EXPECT_TRUE(contains(error, {"rank 2", "broadcast from rank 0 \"weights\", call 0",
                                 "all_reduce of fp32 \"gradients\" [5], call 0", "16 bytes"}));
  }
}

TEST(Disagreement, InNameIndexSizeTypeAndRootIsSeen) {
  using Body = std::function<void(Communicator&, bool other)>;
  std::array<std::int64_t, 8> values{};
  const std::vector<std::pair<const char*, Body>> bodies = {
      {"\"b\"", [](Communicator& comm, bool other) { comm.barrier({other ? "b" : "a"}); }},
      {"\"a\" [2]",
       [](Communicator& comm, bool other) {
         comm.barrier({"a", other ? 2 : 1});
       }},
      {"3 bytes",
       [](Communicator& comm, bool other) {
         const std::array<std::byte, 4> some{};
         static_cast<void>(comm.gather_bytes({"a"}, {some.data(), other ? 3u : 4u}));
       }},
      {"of bf16",
       [&](Communicator& comm, bool other) {
         std::array<std::int64_t, 8> own = values;
         const SumRun run{own.data(), other ? 4 : 2};
         comm.all_reduce({"a"}, {&run, 1}, other ? DType::bf16 : DType::f32);
       }},
      {"from rank 1",
       [&](Communicator& comm, bool other) {
         std::array<std::int64_t, 8> own = values;
         comm.broadcast({"a"}, own.data(), {8}, other ? 1 : 0);
       }},
      {"other sizes one by one", [&](Communicator& comm, bool other) {
         std::array<std::int64_t, 8> own = values;
         const std::array<SumRun, 2> runs = {SumRun{own.data(), other ? 3 : 1}, SumRun{&own[4], other ? 1 : 3}};
         comm.all_reduce({"a"}, runs, DType::i64);
       }}};
  for (const auto& [expected, body] : bodies) {
    const RankErrors errors = run_ranks(2, [&body](Communicator& comm) { body(comm, comm.rank() == 1); });
    for (const std::string& error : errors) {
      EXPECT_TRUE(contains(error, {expected, "rank 0", "rank 1"}));
    }
  }
}

TEST(Disagreement, OfPiecesBetweenTwoRanksEndsTheThirdToo) {
  const RankErrors errors = run_ranks(3, [](Communicator& comm) {
    std::array<std::byte, 8> out{}, in{};
    const int next = (comm.rank() + 1) % 3, previous = (comm.rank() + 2) % 3;
    const Send send{out.data(), {comm.rank() == 0 ? 5 : 4}, next};
    const Receive receive{in.data(), {4}, previous};
    comm.exchange({"ring"}, {&send, 1}, {&receive, 1});
  });
  EXPECT_TRUE(contains(errors[0], {"rank 0 sends 1 piece, 5 bytes to rank 1, which expects 1 piece, 4 bytes"}));
  EXPECT_TRUE(contains(errors[1], {"rank 0 sends 1 piece, 5 bytes to rank 1, which expects 1 piece, 4 bytes"}));
  EXPECT_TRUE(contains(errors[2], {"disagree in exchange \"ring\""}));
}

TEST(Disagreement, OfARankWithItselfIsSeenToo) {
  const auto comm = make_one_rank();
  std::array<std::byte, 8> out{}, in{};
  const Send send{out.data(), {8}, 0};
  const Receive receive{in.data(), {7}, 0};
  EXPECT_THROW(comm->exchange({"own"}, {&send, 1}, {&receive, 1}), RankError);
  EXPECT_THROW(comm->barrier({"after"}), RankError);  // and nothing works afterwards
}

TEST(Disagreement, ABadArgumentOfOneRankEndsTheOthers) {
  const RankErrors errors = run_ranks(2, [](Communicator& comm) {
    std::array<std::byte, 8> data{};
    comm.broadcast({"weights"}, data.data(), {8}, comm.rank() == 0 ? 7 : 1);
  });
  EXPECT_TRUE(contains(errors[0], {"names rank 7, but there are ranks 0 to 1"}));
  EXPECT_TRUE(contains(errors[1], {"rank 0 failed", "names rank 7"}));
}

// ---- waiting
// ---------------------------------------------------------------------------------------------------------

TEST(Timeout, SaysWhoWaitsForWhomInWhatSinceWhen) {
  std::atomic<int> done{0};
  const RankErrors errors = run_ranks(3,
                                      [&](Communicator& comm) {
                                        if (comm.rank() == 1) {
                                          while (done < 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
                                          return;
                                        }
                                        try {
                                          comm.barrier({"save", 12});
                                        } catch (...) {
                                          ++done;
                                          throw;
                                        }
                                      },
                                      {.timeout = Seconds{2}});  // longer than ranks may start apart on a busy machine
  EXPECT_EQ(errors[1], "");
  int timeouts = 0;  // the second may hear of the first's
  for (const int rank : {0, 2}) {
    const std::string& error = errors[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(contains(
        error, {"in barrier \"save\" [12], call 0 of the host's exchanges for rank 1, which", " s (since ", "UTC"}));
    if (error.rfind("rank " + std::to_string(rank) + " of 3 has waited ", 0) == 0) ++timeouts;
  }
  EXPECT_GE(timeouts, 1);
}

// ---- the end of a rank
// -----------------------------------------------------------------------------------------------

TEST(Failure, OfARankReachesThoseWhoWaitInAnyOrder) {
  const RankErrors errors = run_ranks(3, [](Communicator& comm) {
    const std::int64_t value = 1;
    if (comm.rank() == 0) comm.barrier({"host"}, CommOrder::host);
    if (comm.rank() == 1) static_cast<void>(comm.gather_bytes({"lane"}, bytes(value), CommOrder::lane));
    throw std::runtime_error("out of memory in block 3");
  });
  EXPECT_EQ(errors[2], "out of memory in block 3");
  for (const int rank : {0, 1}) EXPECT_TRUE(contains(errors[static_cast<std::size_t>(rank)], {"rank 2 failed"}));
}

TEST(Failure, SaysWhy) {
  const RankErrors errors = run_ranks(2, [](Communicator& comm) {
    if (comm.rank() == 0) return comm.barrier({"next"});
    comm.fail("the disk is full");
    comm.barrier({"next"});
  });
  EXPECT_TRUE(contains(errors[0], {"rank 1 failed: the disk is full"}));
  EXPECT_TRUE(contains(errors[1], {"can no longer work together: the disk is full"}));
}

TEST(Failure, OfARankWhoseOtherThreadWaitsIsSeenThereToo) {
  const RankErrors errors = run_ranks(2, [](Communicator& comm) {
    if (comm.rank() == 1) return comm.barrier({"lane"}, CommOrder::lane);
    std::string lane;
    std::thread network([&] {
      try {
        comm.barrier({"elsewhere"}, CommOrder::host);
      } catch (const RankError& error) {
        lane = error.what();
      }
    });
    comm.fail("no space");
    network.join();
    throw std::runtime_error(lane);
  });
  EXPECT_TRUE(contains(errors[0], {"no space"}));
  EXPECT_TRUE(contains(errors[1], {"rank 0 failed: no space"}));
}

TEST(Failure, ARankThatHasEndedIsNotWaitedFor) {
  const RankErrors errors = run_ranks(3, [](Communicator& comm) {
    comm.barrier({"step"});
    if (comm.rank() != 1) comm.barrier({"step"});
  });
  EXPECT_EQ(errors[1], "");
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(contains(errors[static_cast<std::size_t>(rank)], {"rank 1 has ended its part of the run"}));
  }
}

// ---- three orders of their own
// ---------------------------------------------------------------------------------------

// The lane of one rank is ahead of its host thread, that of the other behind.
TEST(Orders, DoNotWaitForEachOther) {
  const RankErrors errors = run_ranks(2, [](Communicator& comm) {
    constexpr int kRounds = 200;
    std::thread lane([&] {
      for (int i = 0; i < kRounds; ++i) {
        std::int64_t value = i;
        const SumRun run{&value, 1};
        comm.all_reduce({"gradients", i}, {&run, 1}, DType::i64);
        comm.barrier({"norm", i}, CommOrder::lane);
      }
    });
    try {
      for (int i = 0; i < kRounds; ++i) comm.barrier({"weights", i});
    } catch (...) {
      lane.join();
      throw;
    }
    lane.join();
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

}  // namespace
}  // namespace spillway
