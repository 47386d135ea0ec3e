// SPDX-License-Identifier: Apache-2.0
//
// Schedules on several ranks, which are threads here, with made-up gradients of their own: no LibTorch, so that
// sanitizers see every access.
#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "spillway/core/error.h"
#include "support/training_run.h"

namespace spillway::test {
namespace {

// The same ranks, resident, nothing cut, one chunk, one thread.
Outcome shared_reference(Case c) {
  c.schedule = "resident";
  c.partition.stage = 0;
  c.chunk_elements = 1 << 20;
  c.slots = 2;
  c.bucket = 1;
  c.threads = 1;
  c.delay = {};
  return train_ranks(c).front();
}

// Some parameters have no gradient in some micro-batches, and a step is skipped.
Case uneven_case(int ranks, DType working, std::int64_t micro_batches, double clip) {
  return {.micro_batches = micro_batches,
          .clip_norm = clip,
          .working = working,
          .uneven = true,
          .infinite_step = 2,
          .partition = {.ranks = ranks}};
}

OpDelay random_delays(unsigned seed) {
  const auto random = std::make_shared<std::mt19937>(seed);
  const auto mutex = std::make_shared<std::mutex>();
  return [random, mutex](const std::string&, const Op&) {
    unsigned draw = 0;
    {
      const std::scoped_lock lock(*mutex);
      draw = (*random)();
    }
    if (draw % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw / 8 % 60));
    if (draw % 8 == 1) std::this_thread::yield();
  };
}

class EveryScheduleOnRanks : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, EveryScheduleOnRanks, testing::ValuesIn(schedule_names()));

TEST_P(EveryScheduleOnRanks, EndsInTheBitsOfTheResidentRunAtEveryStage) {
  int cells = 0;
  for (int ranks : {2, 3}) {
    for (DType working : {DType::f32, DType::bf16}) {
      for (std::int64_t micro_batches : {1, 3}) {
        for (double clip : {0.0, 1.0}) {
          Case base = uneven_case(ranks, working, micro_batches, clip);
          const Outcome expected = shared_reference(base);
          EXPECT_FALSE(expected.finite[2]);
          for (int stage : {0, 1, 2}) {
            for (std::int64_t chunk : {1024, 3072, 1 << 16}) {
              for (std::int64_t bucket : {1, 2}) {
                Case c = base;
                c.schedule = GetParam();
                c.partition.stage = stage;
                c.chunk_elements = chunk;
                c.slots = 3;
                c.bucket = bucket;
                c.threads = 2;
                for (const Outcome& outcome : train_ranks(c)) expect_same(expected, outcome);
                ++cells;
              }
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(cells, 2 * 2 * 2 * 2 * 3 * 3 * 2);
}

TEST_P(EveryScheduleOnRanks, SumsInTheWorkingTypeAreTheSameAtEveryStageToo) {
  for (DType working : {DType::bf16, DType::f16}) {
    const Case base{
        .micro_batches = 3, .working = working, .low_memory = true, .uneven = true, .partition = {.ranks = 3}};
    const Outcome expected = shared_reference(base);
    for (int stage : {0, 1, 2}) {
      Case c = base;
      c.schedule = GetParam();
      c.partition.stage = stage;
      c.chunk_elements = 3072;
      for (const Outcome& outcome : train_ranks(c)) expect_same(expected, outcome);
    }
  }
}

TEST_P(EveryScheduleOnRanks, OneRankOfAWorldOfItsOwnIsTheRunWithoutRanks) {
  const Case base{.uneven = true};
  Case c = base;
  c.schedule = GetParam();
  c.partition = {.ranks = 1, .stage = 2};
  expect_same(reference(base), train_ranks(c).front());
}

TEST_P(EveryScheduleOnRanks, MoreRanksThanGrainsLeaveSomeWithNothing) {
  for (int stage : {0, 1, 2}) {
    Case base{.steps = 2, .partition = {.ranks = 5}};
    const Outcome expected = shared_reference(base);
    Case c = base;
    c.schedule = GetParam();
    c.partition.stage = stage;
    c.chunk_elements = 1024;
    for (const Outcome& outcome : train_ranks(c)) expect_same(expected, outcome);
  }
}

TEST_P(EveryScheduleOnRanks, NoOrderOfGradientsAndNoNumberOfSlotsChangesABit) {
  for (int stage : {0, 1, 2}) {
    Case base{.uneven = true, .partition = {.ranks = 3, .stage = stage}};
    const Outcome expected = shared_reference(base);
    for (std::int64_t slots : {1, 2, 4, 64}) {
      for (std::int64_t bucket : {1, 3}) {
        Case c = base;
        c.schedule = GetParam();
        c.chunk_elements = 1024;
        c.slots = slots;
        c.bucket = std::min(bucket, slots);
        c.order_seed = static_cast<unsigned>(7 + slots);
        for (const Outcome& outcome : train_ranks(c)) expect_same(expected, outcome);
      }
    }
  }
}

TEST_P(EveryScheduleOnRanks, DelaysChangeNoBit) {
  const Case base{.steps = 3, .uneven = true, .infinite_step = 1, .partition = {.ranks = 3, .stage = 2}};
  const Outcome expected = shared_reference(base);
  for (unsigned seed = 1; seed <= 60; ++seed) {
    Case c = base;
    c.schedule = GetParam();
    c.partition.stage = static_cast<int>(seed % 3);
    c.slots = 2 + seed % 3;
    c.chunk_elements = 1024 * (1 + seed % 5);
    c.delay = random_delays(seed);
    for (const Outcome& outcome : train_ranks(c)) expect_same(expected, outcome);
    if (testing::Test::HasFailure()) FAIL() << "seed " << seed;
  }
}

// ---- reduced in the last micro-batch only --------------------------------------------------------------------------

TEST_P(EveryScheduleOnRanks, ReducedLastEndsInTheBitsOfTheResidentRunThatDoesSo) {
  int cells = 0;
  for (int ranks : {2, 3}) {
    for (DType working : {DType::f32, DType::bf16}) {
      for (std::int64_t micro_batches : {1, 3}) {
        for (double clip : {0.0, 1.0}) {
          Case base = uneven_case(ranks, working, micro_batches, clip);
          const Outcome each = shared_reference(base);
          base.reduce_last = true;
          const Outcome expected = shared_reference(base);
          EXPECT_FALSE(expected.finite[2]);
          // One micro-batch is the last: nothing is added in another order.
          if (micro_batches == 1) expect_same(each, expected);
          for (std::size_t i = 0; i < each.norms.size(); ++i) {
            if (each.finite[i]) {
              EXPECT_NEAR(each.norms[i], expected.norms[i], 1e-2 * each.norms[i]);
            }
          }
          for (int stage : {0, 1}) {
            for (std::int64_t chunk : {1024, 3072}) {
              for (bool known : {true, false}) {
                Case c = base;
                c.schedule = GetParam();
                c.partition.stage = stage;
                c.chunk_elements = chunk;
                c.slots = known ? 3 : 1;
                c.bucket = known ? 2 : 1;
                c.threads = 2;
                c.last_known = known;
                for (const Outcome& outcome : train_ranks(c)) expect_same(expected, outcome);
                ++cells;
              }
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(cells, 2 * 2 * 2 * 2 * 2 * 2 * 2);
}

TEST_P(EveryScheduleOnRanks, ReducedLastInTheWorkingTypeToo) {
  const Case base{.micro_batches = 3,
                  .working = DType::bf16,
                  .low_memory = true,
                  .uneven = true,
                  .partition = {.ranks = 3},
                  .reduce_last = true};
  const Outcome expected = shared_reference(base);
  for (int stage : {0, 1}) {
    Case c = base;
    c.schedule = GetParam();
    c.partition.stage = stage;
    c.chunk_elements = 3072;
    for (const Outcome& outcome : train_ranks(c)) expect_same(expected, outcome);
  }
}

TEST_P(EveryScheduleOnRanks, ReducedLastNoOrderSlotsOrDelaysChangeABit) {
  const Case base{.steps = 3, .micro_batches = 3, .uneven = true, .partition = {.ranks = 3}, .reduce_last = true};
  const Outcome expected = shared_reference(base);
  for (unsigned seed = 1; seed <= 24; ++seed) {
    Case c = base;
    c.schedule = GetParam();
    c.partition.stage = static_cast<int>(seed % 2);
    c.slots = 1 + seed % 4;
    c.bucket = std::min<std::int64_t>(c.slots, 1 + seed % 3);
    c.chunk_elements = 1024 * (1 + seed % 5);
    c.last_known = seed % 4 != 0;
    c.order_seed = seed % 3 == 0 ? seed : 0;
    c.delay = random_delays(seed);
    for (const Outcome& outcome : train_ranks(c)) expect_same(expected, outcome);
    if (testing::Test::HasFailure()) FAIL() << "seed " << seed;
  }
}

TEST(ReducedLast, IsRefusedWhereARankHasNoRoomForItsOwnSums) {
  EXPECT_THROW(train_ranks({.partition = {.ranks = 2, .stage = 2}, .reduce_last = true}), InvalidArgument);
}

TEST_P(EveryScheduleOnRanks, AnOpThatFailsOnOneRankEndsAll) {
  for (const char* where : {"reduce gradients", "stage gradient"}) {
    Case c{.schedule = GetParam(), .steps = 1, .partition = {.ranks = 2, .stage = 1}};
    const auto left = std::make_shared<std::atomic<int>>(3);
    c.delay = [where, left](const std::string&, const Op& op) {
      if (std::string(op.name) == where && --*left == 0) throw std::runtime_error("injected");
    };
    EXPECT_THROW(train_ranks(c), std::runtime_error) << where;
  }
}

}  // namespace
}  // namespace spillway::test
