// SPDX-License-Identifier: Apache-2.0
//
// Schedules on the emulated device with made-up gradients: no LibTorch, so that sanitizers see every access.
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "spillway/core/error.h"
#include "spillway/schedule/schedules.h"
#include "support/training_run.h"

namespace spillway {
namespace {

using test::Case;
using test::expect_same;
using test::Outcome;
using test::reference;
using test::schedule_names;
using test::TrainingRun;

class EverySchedule : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, EverySchedule, testing::ValuesIn(schedule_names()));

TEST_P(EverySchedule, EndsInTheBitsOfTheResidentRun) {
  int cells = 0;
  for (bool uneven : {false, true}) {
    for (std::int64_t infinite_step : {-1, 2}) {
      Case base{.uneven = uneven, .infinite_step = infinite_step};
      const Outcome expected = reference(base);
      for (std::int64_t chunk : {1024, 2048, 5000, 1 << 16}) {
        for (std::int64_t slots : {1, 2, 5}) {
          for (int threads : {1, 3}) {
            for (unsigned order : {0U, 1U, 2U}) {
              Case c = base;
              c.schedule = GetParam();
              c.chunk_elements = chunk;
              c.slots = slots;
              c.threads = threads;
              c.order_seed = order;
              expect_same(expected, TrainingRun(c).train());
              ++cells;
            }
          }
        }
      }
      EXPECT_EQ(expected.finite[2], infinite_step != 2);
    }
  }
  EXPECT_EQ(cells, 2 * 2 * 4 * 3 * 2 * 3);
}

TEST(Delays, AThousandSeededSchedulesChangeNoBit) {
  Case base{.steps = 3, .uneven = true, .infinite_step = 1};
  const Outcome expected = reference(base);
  for (unsigned seed = 1; seed <= 1000; ++seed) {
    Case c = base;
    c.slots = 1 + seed % 3;
    c.threads = 1 + static_cast<int>(seed % 2);
    c.chunk_elements = 1024 * (1 + seed % 5);
    c.order_seed = seed;
    const auto random = std::make_shared<std::mt19937>(seed);
    const auto mutex = std::make_shared<std::mutex>();
    c.delay = [random, mutex](const std::string&, const Op&) {
      unsigned draw = 0;
      {
        const std::scoped_lock lock(*mutex);
        draw = (*random)();
      }
      if (draw % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw / 8 % 60));
      if (draw % 8 == 1) std::this_thread::yield();
    };
    expect_same(expected, TrainingRun(c).train());
    if (testing::Test::HasFailure()) FAIL() << "seed " << seed;
  }
}

TEST(Decision, ClipsAsPyTorchDoesAndRefusesWhatIsNotFinite) {
  const StepDecision free = decide({4.0, true}, {1.0, 0});
  EXPECT_EQ(free.grad_norm, 2.0);
  EXPECT_EQ(free.scale.grad_factor, 1.0F);
  EXPECT_EQ(decide({4.0, true}, {1.0, 1.0}).scale.grad_factor, static_cast<float>(1.0 / (2.0 + 1e-6)));
  EXPECT_EQ(decide({4.0, true}, {1.0, 5.0}).scale.grad_factor, 1.0F);
  EXPECT_EQ(decide({4.0, true}, {0.25, 5.0}).scale.grad_factor, 0.25F);
  EXPECT_FALSE(decide({std::numeric_limits<double>::infinity(), false}, {1.0, 1.0}).finite);
}

TEST(Schedules, AnUnknownNameListsThemAll) {
  try {
    find_schedule("zero_infinity");
    FAIL() << "an unknown schedule was found";
  } catch (const InvalidArgument& error) {
    for (const ScheduleEntry& entry : schedules())
      EXPECT_NE(std::string(error.what()).find(entry.name), std::string::npos);
  }
}

TEST(Failures, AnOpThatFailsReachesTheStepAndLeavesNothingRunning) {
  for (const char* where : {"gradients down", "accumulate", "norm"}) {
    Case c{.steps = 1};
    c.delay = [where](const std::string&, const Op& op) {
      if (std::string(op.name) == where && op.index == 1) throw std::runtime_error("injected");
    };
    TrainingRun run(c);
    EXPECT_THROW(run.train(), std::runtime_error) << where;
  }
}

}  // namespace
}  // namespace spillway
