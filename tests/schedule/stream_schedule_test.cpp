// SPDX-License-Identifier: Apache-2.0
// Schedules on a device with streams that works by itself, whose memory the host cannot read: a GPU's machine, with
// threads in place of the GPU. The runs on the emulated device say which bits are right.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "spillway/core/error.h"
#include "support/thread_machine.h"
#include "support/training_run.h"

namespace spillway::test {
namespace {

// A delay for streams and lanes, the same draws for the same seed in each.
std::function<void()> delay_of(unsigned seed) {
  const auto random = std::make_shared<std::mt19937>(seed);
  const auto mutex = std::make_shared<std::mutex>();
  return [random, mutex] {
    unsigned draw = 0;
    {
      const std::scoped_lock lock(*mutex);
      draw = (*random)();
    }
    if (draw % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw / 8 % 60));
    if (draw % 8 == 1) std::this_thread::yield();
  };
}

Case on_streams(Case c, unsigned seed) {
  c.machine = [seed](const MachineOptions& options) {
    return make_thread_machine(options, seed == 0 ? std::function<void()>() : delay_of(seed));
  };
  if (seed != 0) c.delay = [delay = delay_of(seed + 1)](const std::string&, const Op&) { delay(); };
  return c;
}

class EveryScheduleOnStreams : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, EveryScheduleOnStreams, testing::ValuesIn(schedule_names()));

TEST_P(EveryScheduleOnStreams, EndsInTheBitsOfTheEmulatedDevice) {
  for (DType working : {DType::f32, DType::bf16, DType::f16}) {
    for (std::int64_t infinite_step : {-1, 2}) {
      const Case base{.working = working, .uneven = true, .infinite_step = infinite_step};
      const Outcome expected = reference(base);
      EXPECT_EQ(expected.finite[2], infinite_step != 2);
      EXPECT_EQ(expected.culprits.empty(), infinite_step != 2);
      for (std::int64_t chunk : {1024, 5000, 1 << 16}) {
        for (std::int64_t slots : {1, 3}) {
          Case c = on_streams(base, 0);
          c.schedule = GetParam();
          c.chunk_elements = chunk;
          c.slots = slots;
          c.threads = 2;
          c.order_seed = static_cast<unsigned>(slots);
          expect_same(expected, TrainingRun(c).train());
        }
      }
    }
  }
}

TEST_P(EveryScheduleOnStreams, SumsOfGradientsInTheWorkingTypeToo) {
  for (DType working : {DType::bf16, DType::f16}) {
    const Case base{.working = working, .low_memory = true, .uneven = true, .infinite_step = 1};
    const Outcome expected = reference(base);
    Case c = on_streams(base, 3);
    c.schedule = GetParam();
    c.chunk_elements = 3072;
    expect_same(expected, TrainingRun(c).train());
  }
}

TEST_P(EveryScheduleOnStreams, DelaysOfStreamsAndLanesChangeNoBit) {
  const Case base{.steps = 3, .uneven = true, .infinite_step = 1};
  const Outcome expected = reference(base);
  for (unsigned seed = 1; seed <= 100; ++seed) {
    Case c = on_streams(base, seed);
    c.schedule = GetParam();
    c.slots = 1 + seed % 3;
    c.chunk_elements = 1024 * (1 + seed % 5);
    c.order_seed = seed;
    expect_same(expected, TrainingRun(c).train());
    if (testing::Test::HasFailure()) FAIL() << "seed " << seed;
  }
}

TEST_P(EveryScheduleOnStreams, TheDeviceHoldsWhatWasPlanned) {
  Case c = on_streams(Case{.working = DType::bf16}, 0);
  c.schedule = GetParam();
  TrainingRun run(c);
  const MemoryUsage device = run.machine().ledger(Tier::device)->used();
  const Layout& layout = run.layout();
  const MemoryPlan plan = plan_state(layout, run.store().spec());
  for (MemoryUse use : {MemoryUse::parameters, MemoryUse::gradients, MemoryUse::masters, MemoryUse::optimizer_states,
                        MemoryUse::staging}) {
    EXPECT_EQ(device[use], plan[Tier::device][use]) << to_string(use);
  }
  const bool sums_there = run.store().placement(0).gradient == Tier::device;
  EXPECT_EQ(run.store().device_sums().size.value, sums_there ? layout.padded_elements() / kGrainElements * 8 : 0);
}

TEST(OnStreams, WhatGoesWrongOnTheDeviceReachesTheStep) {
  for (const std::string& schedule : schedule_names()) {
    const auto left = std::make_shared<std::atomic<int>>(60);  // pieces of work that go well
    Case c{.schedule = schedule};
    c.machine = [left](const MachineOptions& options) {
      return make_thread_machine(options, [left] {
        if (--*left < 0) throw DeviceError("an illegal address");
      });
    };
    TrainingRun run(c);
    EXPECT_THROW(run.train(), DeviceError) << schedule;
  }
}

}  // namespace
}  // namespace spillway::test
