// SPDX-License-Identifier: Apache-2.0
//
// Capacity of the emulated device: refusals before a run, out of memory within one, what is left behind.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "spillway/core/error.h"
#include "spillway/train/engine.h"
#include "support/bits.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::same_bits;
using test::tiny_config;
using test::tiny_llama;

TEST(Memory, AResidentRunThatCannotFitIsRefusedWithTheBytesMissing) {
  const auto model = tiny_llama(false);
  Config config = tiny_config("resident", 0, 4096, 1);
  const Bytes needed = plan_memory(*model, config)[Tier::device].total();
  const torch::Tensor before = model->parameters()[0].detach().clone();
  config.device.memory = Bytes{needed.value - 1000};
  try {
    Engine engine(*model, config);
    FAIL() << "an engine was made";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.missing(), 1000);
    EXPECT_EQ(error.requested(), needed.value);
    EXPECT_NE(std::string(error.what()).find("zero_offload would fit"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("optimizer states"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(same_bits(before, model->parameters()[0]));
  config.schedule = "zero_offload";
  Engine engine(*model, config);  // the same module may be used with what fits
}

TEST(Memory, TheDeviceNeverHoldsMoreThanItsCapacityAndAStepThatDoesNotFitCanBeRetried) {
  const auto model = tiny_llama(false), reference = tiny_llama(false);
  Config config = tiny_config("zero_offload", 0.5, 4096, 1);
  const Bytes states = plan_memory(*model, config)[Tier::device].total();
  config.device.memory = states + Bytes{600 * 1024};
  Engine engine(*model, config);
  const auto backward = [](CausalLM& m, Engine& e, std::int64_t rows) {
    const torch::Tensor tokens = torch::arange(rows * 12).reshape({rows, 12}) % 64;
    e.backward(next_token_loss(m.forward(tokens), tokens, rows * 12), {.last = true});
  };
  const std::int64_t small = 2, large = 64;
  backward(*model, engine, small);
  engine.step();
  for (int attempt = 0; attempt < 3; ++attempt) {
    try {
      backward(*model, engine, large);
      FAIL() << "the batch fitted";
    } catch (const OutOfMemory& error) {
      EXPECT_NE(std::string(error.what()).find("activations"), std::string::npos);
      EXPECT_GT(error.missing(), 0);
    }
  }
  EXPECT_LE(engine.summary().device_peak, *config.device.memory);
  backward(*model, engine, small);
  engine.step();
  // As if the large batches had never been tried.
  Config roomy = config;
  roomy.device.memory.reset();
  Engine other(*reference, roomy);
  for (int i = 0; i < 2; ++i) {
    backward(*reference, other, small);
    other.step();
  }
  for (const std::string& name : test::trained_names(*model))
    EXPECT_TRUE(same_bits(engine.master(name), other.master(name))) << name;
}

TEST(Memory, TheLedgerHoldsWhatThePlanPromisesAndNothingIsLeftBehind) {
  for (const char* schedule : {"resident", "zero_offload"}) {
    const auto model = tiny_llama(true);
    const Config config = tiny_config(schedule, 0, 4096, 1);
    const MemoryPlan plan = plan_memory(*model, config);
    for (int round = 0; round < 3; ++round) {
      Engine engine(*model, config);
      const EngineSummary summary = engine.summary();
      EXPECT_EQ(summary.device_peak, plan[Tier::device].total());
      EXPECT_EQ(summary.host_peak, plan[Tier::pinned].total());
      EXPECT_EQ(summary.device_at_peak, plan[Tier::device]);
    }
  }
}

TEST(Memory, ActivationsCountOnTheDeviceOnlyInsideItsScope) {
  const auto ledger = std::make_shared<MemoryLedger>(Tier::device, Bytes{1 << 20});
  torch::Tensor outlives;
  {
    const DeviceScope scope(ledger);
    outlives = torch::empty({1024});
    EXPECT_EQ(ledger->used().total().value, 4096);
    {
      const HostScope host;
      const torch::Tensor free = torch::empty({1 << 20});
      EXPECT_EQ(ledger->used().total().value, 4096);
    }
    EXPECT_THROW(torch::empty({1 << 20}), OutOfMemory);
    EXPECT_EQ(ledger->used().total().value, 4096);
  }
  const torch::Tensor after = torch::empty({1024});
  EXPECT_EQ(ledger->used().total().value, 4096);
  outlives.reset();
  EXPECT_EQ(ledger->used().total().value, 0);
}

}  // namespace
}  // namespace spillway
