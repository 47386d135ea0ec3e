// SPDX-License-Identifier: Apache-2.0
//
// Between phases: release and restore of all memory, the profiling step, low-memory accumulation.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/train/engine.h"
#include "support/bits.h"
#include "train/branches.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::same_bits;
using test::tiny_config;
using test::tiny_llama;

StepResult step(CausalLM& model, Engine& engine, std::int64_t number, std::int64_t rows = 2) {
  torch::Tensor tokens;
  {
    const HostScope host;
    tokens = (torch::arange(rows * 12).reshape({rows, 12}) * (number % 5 + 1)) % 64;
  }
  const torch::Tensor loss = next_token_loss(model.forward(tokens), tokens, rows * 12);  // frees the logits
  engine.backward(loss, {.last = true});
  return engine.step();
}

class Phases : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, Phases, testing::ValuesIn(test::schedule_names()));

TEST_P(Phases, ReleaseGivesAllMemoryBackAndRestoreGoesOnBitForBit) {
  const std::filesystem::path file = std::filesystem::path(testing::TempDir()) / "spillway_released";
  for (DType precision : {DType::f32, DType::bf16}) {
    for (bool to_file : {false, true}) {
      const auto model = tiny_llama(true), reference = tiny_llama(true);
      Config config = tiny_config(GetParam(), 0.5, 4096, 1);
      config.precision = precision;
      Engine engine(*model, config), other(*reference, config);
      for (int n = 0; n < 3; ++n) step(*model, engine, n), step(*reference, other, n);
      engine.release(to_file ? std::optional(file) : std::nullopt);
      EXPECT_EQ(std::filesystem::exists(file), to_file);
      EXPECT_EQ(engine.memory_in_use(Tier::device).total().value, 0);
      EXPECT_EQ(engine.memory_in_use(Tier::pinned).total().value, 0);
      // The module is an ordinary one meanwhile, with the newest weights.
      const torch::Tensor weight = model->parameters()[0].detach();
      EXPECT_TRUE(same_bits(weight, other.master("model.embed_tokens.weight").to(weight.scalar_type())));
      EXPECT_EQ(generate_greedy(*model, {1, 2, 3}, 4), generate_greedy(*reference, {1, 2, 3}, 4));
      EXPECT_THROW(step(*model, engine, 3), StateError);
      EXPECT_THROW(engine.master("model.norm.weight"), StateError);
      engine.release();  // a second time: changes nothing
      EXPECT_EQ(std::filesystem::exists(file), to_file);
      engine.restore();
      EXPECT_FALSE(std::filesystem::exists(file));
      engine.restore();
      for (int n = 3; n < 6; ++n) step(*model, engine, n), step(*reference, other, n);
      for (const std::string& name : test::trained_names(*model)) {
        EXPECT_TRUE(same_bits(engine.master(name), other.master(name))) << name;
        EXPECT_TRUE(same_bits(engine.optimizer_state(name, 1), other.optimizer_state(name, 1))) << name;
      }
    }
  }
}

TEST_P(Phases, WeightsWrittenWhileReleasedAreTrainedFrom) {
  const auto model = tiny_llama(false);
  Engine engine(*model, tiny_config(GetParam(), 0, 4096, 1));
  step(*model, engine, 1);
  engine.release();
  {
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& p : model->parameters()) p.fill_(0.25);
  }
  engine.restore();
  step(*model, engine, 2);
  EXPECT_LT((engine.master("lm_head.weight") - 0.25).abs().max().item<float>(), 0.02F);
}

TEST_P(Phases, ReleaseIsRefusedInsideAStepAndWhereTheFileExistsAlready) {
  const auto model = tiny_llama(false);
  Engine engine(*model, tiny_config(GetParam(), 0, 4096, 1));
  const torch::Tensor tokens = torch::arange(12).reshape({1, 12});
  engine.backward(next_token_loss(model->forward(tokens), tokens, 12));
  EXPECT_THROW(engine.release(), StateError);
  EXPECT_THROW(engine.profile([] { return torch::zeros({}); }), StateError);
  engine.step();
  EXPECT_THROW(engine.release(std::filesystem::path(testing::TempDir())), InvalidArgument);
  EXPECT_THROW(engine.release(std::filesystem::path(testing::TempDir()) / "no_such_folder" / "file"), FileError);
  step(*model, engine, 1);  // nothing was lost
}

TEST_P(Phases, TheProfilingStepMeasuresWhatATrainingStepWillHoldAndChangesNothing) {
  const auto model = tiny_llama(false), reference = tiny_llama(false);
  const Config config = tiny_config(GetParam(), 0.5, 4096, 1);
  Engine engine(*model, config);
  const torch::Tensor tokens = torch::arange(96).reshape({8, 12}) % 64;
  const MemoryPlan plan = engine.profile([&] { return next_token_loss(model->forward(tokens), tokens, 96); });
  EXPECT_GT(plan[Tier::device][MemoryUse::activations].value, 0);
  for (int n = 0; n < 3; ++n) {
    const StepResult result = step(*model, engine, n, 8);
    EXPECT_LE(result.device_peak, plan[Tier::device].total());
    EXPECT_GE(result.device_peak.value, plan[Tier::device].total().value * 0.85);
  }
  Engine other(*reference, config);
  for (int n = 0; n < 3; ++n) step(*reference, other, n, 8);
  for (const std::string& name : test::trained_names(*model))
    EXPECT_TRUE(same_bits(engine.master(name), other.master(name))) << name;
}

TEST_P(Phases, AProfilingStepThatShowsTooLittleMemorySaysHowMuchIsMissing) {
  const auto model = tiny_llama(false);
  Config config = tiny_config(GetParam(), 0, 4096, 1);
  const Bytes states = plan_memory(*model, config)[Tier::device].total();
  config.device.memory = states + Bytes{250 * 1024};
  Engine engine(*model, config);
  const torch::Tensor tokens = torch::arange(32 * 12).reshape({32, 12}) % 64;
  try {
    engine.profile([&] { return next_token_loss(model->forward(tokens), tokens, 32 * 12); });
    FAIL() << "it fitted";
  } catch (const OutOfMemory& error) {
    EXPECT_GT(error.missing(), 0);
    EXPECT_EQ(error.requested() - error.missing(), config.device.memory->value);
    EXPECT_NE(std::string(error.what()).find("activations"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("recompute"), std::string::npos) << error.what();
  }
  EXPECT_LE(step(*model, engine, 1, 1).device_peak, *config.device.memory);
  EngineOptions known;
  known.activations = Bytes{300 * 1024};
  const auto other = tiny_llama(false);
  EXPECT_THROW(Engine(*other, config, known), OutOfMemory);
}

// ---- low-memory accumulation
// -----------------------------------------------------------------------------------------

TEST(LowMemoryAccumulation, TakesHalfTheBytesIsReportedAndEqualOnEverySchedule) {
  for (DType precision : {DType::bf16, DType::f16}) {
    Config config = tiny_config("resident", 0.5, 1 << 20, 1);
    config.precision = precision;
    config.loss_scale.initial = 256;
    std::vector<std::string> messages;
    test::RunOptions options{.steps = 6, .micro_batches = 3};
    options.engine.log = [&](LogLevel level, const std::string& text) {
      if (level != LogLevel::info) messages.push_back(text);
    };
    const test::FinalState exact = test::train(tiny_llama(true), config, options);
    EXPECT_TRUE(messages.empty());
    const Bytes wide = plan_memory(*tiny_llama(true), config)[Tier::device][MemoryUse::gradients];
    config.low_memory_accumulation = true;
    const Bytes narrow = plan_memory(*tiny_llama(true), config)[Tier::device][MemoryUse::gradients];
    EXPECT_NEAR(static_cast<double>(narrow.value), static_cast<double>(wide.value) / 2, 1024);
    const test::FinalState low = test::train(tiny_llama(true), config, options);
    ASSERT_EQ(messages.size(), 1u);
    EXPECT_NE(messages[0].find("low-memory accumulation"), std::string::npos);
    EXPECT_NE(exact.norms, low.norms) << "it is another sum";
    EXPECT_NEAR(exact.losses.back(), low.losses.back(), 0.05);
    for (std::int64_t chunk : {1024, 7 * 1024}) {
      Config offloaded = config;
      offloaded.schedule = "zero_offload";
      offloaded.chunk_elements = chunk;
      offloaded.threads = 2;
      test::expect_same_bits(low, test::train(tiny_llama(true), offloaded, options));
    }
  }
}

TEST(LowMemoryAccumulation, ChangesNothingInFp32) {
  Config config = tiny_config("zero_offload", 0.5, 4096, 1);
  const test::RunOptions options{.steps = 4, .micro_batches = 2};
  const test::FinalState expected = test::train(tiny_llama(false), config, options);
  config.low_memory_accumulation = true;
  test::expect_same_bits(expected, test::train(tiny_llama(false), config, options));
}

}  // namespace
}  // namespace spillway
