// SPDX-License-Identifier: Apache-2.0
#include "spillway/lane/lane.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <thread>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/lane/thread_team.h"
#include "support/process_memory.h"

namespace spillway {
namespace {

Op op(std::function<void()> body, std::vector<Ticket> after = {}) {
  return {"op", 0, OpKind::compute, 0, std::move(after), [body = std::move(body)](StreamRef) { body(); }};
}

std::unique_ptr<Lane> lane(const char* name) {
  return make_thread_lane(name, {}, {});
}

TEST(Lane, RunsOpsInTheOrderTheyWereSubmitted) {
  const auto a = lane("a");
  std::vector<int> order;
  Ticket last;
  for (int i = 0; i < 100; ++i) last = a->submit(op([&order, i] { order.push_back(i); }));
  last.wait();
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order.at(static_cast<std::size_t>(i)), i);
}

TEST(Lane, AnOpStartsAfterItsTicketsOnOtherLanes) {
  const auto a = lane("a"), b = lane("b");
  for (int round = 0; round < 50; ++round) {
    int value = 0;  // not atomic: the tickets order the accesses, which the thread sanitizer checks
    const Ticket first = a->submit(op([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(round * 10));
      value = 1;
    }));
    const Ticket second = b->submit(op([&] { value = value == 1 ? 2 : -1; }, {first}));
    second.wait();
    EXPECT_EQ(value, 2);
  }
}

TEST(Lane, AFailedOpFailsItsDependentsAndNobodyElse) {
  const auto a = lane("a"), b = lane("b");
  std::atomic<bool> ran = false;
  const Ticket failed = a->submit(op([] { throw std::runtime_error("the disk is on fire"); }));
  const Ticket dependent = b->submit(op([&] { ran = true; }, {failed}));
  const Ticket chained = a->submit(op([&] { ran = true; }, {dependent}));
  const Ticket other = a->submit(op([] {}));
  other.wait();
  for (const Ticket& ticket : {failed, dependent, chained}) {
    try {
      ticket.wait();
      FAIL() << "a failed ticket did not throw";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "the disk is on fire");
    }
    EXPECT_TRUE(ticket.done());
  }
  EXPECT_FALSE(ran);
}

TEST(Lane, TheDestructorRunsWhatWasSubmitted) {
  std::atomic<int> ran = 0;
  {
    const auto a = lane("a");
    for (int i = 0; i < 20; ++i) static_cast<void>(a->submit(op([&] { ++ran; })));
  }
  EXPECT_EQ(ran, 20);
}

TEST(Lane, ADefaultTicketIsDoneAndCopiesShareTheirState) {
  EXPECT_TRUE(Ticket().done());
  Ticket().wait();
  const auto a = lane("a");
  const Ticket ticket = a->submit(op([] {}));
  const Ticket copy = ticket;  // NOLINT: the copy is what is tested
  copy.wait();
  EXPECT_TRUE(ticket.done());
}

TEST(Lane, BothDirectionsOfALinkRunAtOnce) {
  // Each of the two ops only ends when the other has begun.
  const auto up = lane("h2d"), down = lane("d2h");
  std::atomic<int> begun = 0;
  const auto meet = [&] {
    ++begun;
    while (begun < 2) std::this_thread::yield();
  };
  const Ticket first = up->submit(op(meet)), second = down->submit(op(meet));
  first.wait();
  second.wait();
  EXPECT_EQ(begun, 2);
}

TEST(Lane, ACopyTakesAtLeastItsLinksTime) {
  const auto a = make_thread_lane("h2d", {1e6, {0.002}}, {});
  const std::int64_t begin = Trace::now();
  a->submit({"copy", 0, OpKind::copy, 10e3, {}, [](StreamRef) {}}).wait();
  EXPECT_GE(Trace::now() - begin, 12'000'000);
}

TEST(ComputeLane, RunsAtOnceOnTheCallingThreadAfterItsTickets) {
  const auto compute = make_inline_compute_lane(0, {});
  const auto a = lane("a");
  const auto caller = std::this_thread::get_id();
  int value = 0;
  const Ticket before = a->submit(op([&] { value = 7; }));
  const Ticket ticket = compute->submit(op(
      [&] {
        EXPECT_EQ(std::this_thread::get_id(), caller);
        EXPECT_EQ(value, 7);
      },
      {before}));
  EXPECT_TRUE(ticket.done());
  EXPECT_TRUE(compute->mark("here", 0, 0).done());
}

TEST(ComputeLane, MarksPaceToTheModelledRate) {
  const auto compute = make_inline_compute_lane(1e9, {});
  const std::int64_t begin = Trace::now();
  static_cast<void>(compute->mark("block", 0, 5e6));
  EXPECT_GE(Trace::now() - begin, 4'900'000);
}

TEST(ThreadTeam, CoversEveryElementOnceAtAnySize) {
  for (int threads : {1, 2, 3, 5}) {
    ThreadTeam team(threads);
    EXPECT_EQ(team.threads(), threads);
    for (std::int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> seen(static_cast<std::size_t>(count));
      team.parallel_for(count, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
      });
      for (const auto& n : seen) EXPECT_EQ(n, 1);
    }
  }
}

TEST(ThreadTeam, HandsOnTheFirstErrorAndGoesOn) {
  ThreadTeam team(3);
  EXPECT_THROW(team.parallel_for(3,
                                 [](std::int64_t begin, std::int64_t) {
                                   if (begin == 1) throw std::runtime_error("x");
                                 }),
               std::runtime_error);
  std::atomic<std::int64_t> sum = 0;
  team.parallel_for(10, [&](std::int64_t begin, std::int64_t end) { sum += end - begin; });
  EXPECT_EQ(sum, 10);
}

// ---- threads that the system does not start ------------------------------------------------------------------------

/// Leaves the process addresses for a few threads with stacks of `stack` bytes, and none at all for larger ones.
void limit_addresses(std::size_t stack) {
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const auto bytes = static_cast<rlim_t>(pages * ::getpagesize() + (std::int64_t{256} << 20));
  const rlimit limit{bytes, bytes};
  pthread_attr_t attributes;
  if (setrlimit(RLIMIT_AS, &limit) != 0 || pthread_attr_init(&attributes) != 0 ||
      pthread_attr_setstacksize(&attributes, stack) != 0 || pthread_setattr_default_np(&attributes) != 0) {
    std::_Exit(3);
  }
}

/// In a process of its own: says the error and ends with 0.
template <class Body>
void expect_error(std::size_t stack, const Body& body) {
  limit_addresses(stack);
  try {
    body();
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::_Exit(0);
  }
  std::_Exit(2);
}

TEST(ThreadTeam, EndsWhatItStartedWhereTheSystemStartsNoMore) {
  if (!test::kProcessMemoryIsMeasurable) GTEST_SKIP() << "a sanitizer needs all addresses";
  EXPECT_EXIT(expect_error(std::size_t{64} << 20, [] { ThreadTeam team(500); }), testing::ExitedWithCode(0),
              "a team of 500 threads was asked for, of which the system started [2-5] .*expected all");
}

TEST(Lane, NamesItselfWhereTheSystemStartsNoThread) {
  if (!test::kProcessMemoryIsMeasurable) GTEST_SKIP() << "a sanitizer needs all addresses";
  EXPECT_EXIT(expect_error(std::size_t{1} << 30, [] { static_cast<void>(lane("upload")); }), testing::ExitedWithCode(0),
              "started no thread for the lane \"upload\"");
}

}  // namespace
}  // namespace spillway
