// SPDX-License-Identifier: Apache-2.0
//
// Promise 2 for memory: the plan made from a model's shape alone is what a run then holds.
#include "spillway/train/activations.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "spillway/core/error.h"
#include "spillway/plan/run_plan.h"
#include "spillway/train/engine.h"
#include "support/process_memory.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::tiny_config;

ModelConfig shape(ModelFamily family, bool tied) {
  ModelConfig config = test::tiny_llama(tied)->config();
  config.family = family;
  config.layers = 3;
  if (family == ModelFamily::gpt2) {
    config.kv_heads = config.heads;
    config.embedding_dropout = config.attention_dropout = config.residual_dropout = 0.1;
    config.activation = Activation::gelu_tanh;
  }
  if (family == ModelFamily::gemma2) {
    config.activation = Activation::gelu_tanh;
    config.norm_plus_one = config.branch_norms = config.scale_embedding = true;
    config.attention_softcap = config.logit_softcap = 4;
    config.sliding_window = 7;
    config.layer_slides = {true, false, true};
  }
  return config;
}

void expect_peak_as_planned(const ModelConfig& shape, const Config& config, BatchShape batch) {
  const auto meta = meta_causal_lm(shape, config.precision);
  const Bytes activations = profile_activations(*meta, config, batch);
  const MemoryPlan plan = plan_run(planned_parameters(shape, config), config, activations).memory;
  const auto model = make_causal_lm(shape, 1);
  model->train();
  EngineOptions options;
  options.activations = activations;
  options.log = [](LogLevel, const std::string&) {};
  Engine engine(*model, config, options);
  EXPECT_EQ(engine.summary().plan[Tier::device], plan[Tier::device]) << "shape and module give one plan";
  EXPECT_EQ(engine.summary().plan[Tier::pinned], plan[Tier::pinned]);
  torch::Tensor tokens;
  {
    const HostScope host;
    tokens = torch::arange(batch.rows * batch.tokens).reshape({batch.rows, batch.tokens}) % shape.vocabulary;
  }
  for (int step = 0; step < 3; ++step) {
    for (bool last : {false, true}) {
      const torch::Tensor loss = next_token_loss(model->forward(tokens), tokens, batch.rows * batch.tokens);
      engine.backward(loss, {.last = last});
    }
    engine.step();
  }
  const EngineSummary summary = engine.summary();
  EXPECT_LE(summary.device_peak, plan[Tier::device].total());
  EXPECT_GE(static_cast<double>(summary.device_peak.value),
            0.85 * static_cast<double>(plan[Tier::device].total().value));
  EXPECT_LE(summary.device_at_peak[MemoryUse::activations], activations);
  EXPECT_GE(static_cast<double>(summary.device_at_peak[MemoryUse::activations].value),
            0.85 * static_cast<double>(activations.value));
  EXPECT_EQ(summary.host_peak, plan[Tier::pinned].total());
}

TEST(Activations, OfAPlanFromShapesAloneAreThoseARunHolds) {
  for (ModelFamily family : {ModelFamily::llama, ModelFamily::gpt2, ModelFamily::gemma2}) {
    for (bool tied : {false, true}) {
      for (DType precision : {DType::f32, DType::bf16}) {
        for (bool recompute : {false, true}) {
          for (const char* schedule : {"resident", "zero_offload"}) {
            for (const BatchShape& batch : {BatchShape{2, 12}, BatchShape{16, 32}}) {
              SCOPED_TRACE(testing::Message() << to_string(family) << " tied " << tied << " " << to_string(precision)
                                              << " recompute " << recompute << " " << schedule << " " << batch.rows);
              Config config = tiny_config(schedule, 1, 4096, 1);
              config.precision = precision;
              config.recompute = recompute;
              expect_peak_as_planned(shape(family, tied), config, batch);
            }
          }
        }
      }
    }
  }
}

ModelConfig main_job_model() {
  return ModelConfig::load(std::string(SPILLWAY_SOURCE_DIR) + "/examples/tiny_llama.json");
}

TEST(Activations, OfTheMainJob) {
  Config config = tiny_config("zero_offload", 1, 0, 1);
  expect_peak_as_planned(main_job_model(), config, {4, 64});
}

TEST(HostMemory, OfTheMainJobIsSixteenBytesAPaddedElementAndTheRing) {
  Config config = tiny_config("zero_offload", 1, 0, 1);
  const RunPlan plan = plan_run(planned_parameters(main_job_model(), config), config);
  const std::int64_t ring = plan.memory[Tier::pinned][MemoryUse::staging].value;
  EXPECT_EQ(ring, config.staging_slots * plan.layout->chunk_elements() * 4);
  const std::int64_t gaps = 4 * Pool::kAlignment.value;  // between the four roles
  EXPECT_LE(plan.memory[Tier::pinned].total().value, 16 * plan.layout->padded_elements() + ring + gaps);
  EXPECT_EQ(plan.memory[Tier::host].total().value, 0);
}

// Bytes of this process that are in memory.
std::int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t pages = 0, resident = 0;
  statm >> pages >> resident;
  return resident * 4096;
}

TEST(HostMemory, DoesNotGrowOverThreeHundredSteps) {
  const auto model = test::tiny_llama(true);
  Config config = tiny_config("zero_offload", 1, 4096, 1);
  config.device.memory = Bytes{std::int64_t{4} << 20};
  Engine engine(*model, config);
  torch::Tensor tokens;
  {
    const HostScope host;
    tokens = torch::arange(24).reshape({2, 12});
  }
  MemoryUsage device, pinned;
  std::int64_t resident = 0;
  for (int step = 1; step <= 300; ++step) {
    engine.backward(next_token_loss(model->forward(tokens), tokens, 24), {.last = true});
    const StepResult result = engine.step();
    if (step == 50) {
      device = engine.memory_in_use(Tier::device);
      pinned = engine.memory_in_use(Tier::pinned);
      resident = resident_bytes();
    }
    ASSERT_LE(result.device_peak, *config.device.memory);
  }
  EXPECT_EQ(engine.memory_in_use(Tier::device), device);
  EXPECT_EQ(engine.memory_in_use(Tier::pinned), pinned);
  // An allocator keeps odd pages; 250 steps that leak a tensor of this model's would show.
  if (test::kProcessMemoryIsMeasurable) {
    EXPECT_LT(resident_bytes() - resident, 2 << 20);
  }
}

TEST(Activations, OfASeventyBillionParameterModelArePlannedWithoutMemory) {
  ModelConfig config = main_job_model();
  config.vocabulary = 128256;
  config.hidden = 8192;
  config.intermediate = 28672;
  config.layers = 80;
  config.heads = 64;
  config.kv_heads = 8;
  config.head_dim = 128;
  config.max_position = 8192;
  const std::int64_t before = resident_bytes();
  Config run = tiny_config("zero_offload", 1, 0, 1);
  run.precision = DType::bf16;
  const auto meta = meta_causal_lm(config, DType::bf16);
  const Bytes kept = profile_activations(*meta, run, {1, 4096});
  run.recompute = true;
  const Bytes again = profile_activations(*meta, run, {1, 4096});
  EXPECT_GT(kept.value, again.value * 4);
  const MemoryPlan plan = plan_run(planned_parameters(config, run), run, again).memory;
  EXPECT_GT(plan[Tier::device][MemoryUse::parameters].value, std::int64_t{130} << 30);
  EXPECT_GT(plan[Tier::pinned].total().value, std::int64_t{1000} << 30);
  EXPECT_LT(resident_bytes() - before, 256 << 20);
}

TEST(Activations, NeedAModelWithoutMemory) {
  const auto real = test::tiny_llama(false);
  EXPECT_THROW(profile_activations(*real, {}, {1, 8}), InvalidArgument);
}

}  // namespace
}  // namespace spillway
