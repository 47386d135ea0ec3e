// SPDX-License-Identifier: Apache-2.0
//
// Promise 2: what a model's shape says that an engine will do is what the engine does, op by op.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "spillway/models/causal_lm.h"
#include "spillway/plan/record_run.h"
#include "spillway/plan/run_plan.h"
#include "spillway/train/engine.h"
#include "support/op_log.h"
#include "train/rank_runs.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::OpLog;
using test::tiny_config;

constexpr std::int64_t kSteps = 3, kInfiniteStep = 1;

ModelConfig tiny_model(ModelFamily family, bool tied) {
  ModelConfig model;
  model.family = family;
  model.vocabulary = 64;
  model.hidden = 32;
  model.intermediate = 80;
  model.layers = 2;
  model.heads = 4;
  model.kv_heads = family == ModelFamily::gpt2 ? 4 : 2;
  model.head_dim = 8;
  model.max_position = 32;
  model.tied_head = tied;
  const bool gemma = family == ModelFamily::gemma3;
  model.activation = family == ModelFamily::gpt2 || gemma ? Activation::gelu_tanh : Activation::silu;
  model.qk_norm = family == ModelFamily::qwen3 || gemma;
  model.norm_plus_one = model.branch_norms = model.scale_embedding = gemma;
  model.attention_bias = family == ModelFamily::gpt2 || family == ModelFamily::qwen2;
  model.attention_output_bias = model.mlp_bias = family == ModelFamily::gpt2;
  return model;
}

/// What an engine does: the ops of its lanes, and its plan.
MemoryPlan train(OpLog& log, const ModelConfig& shape, const Config& config, std::int64_t micro_batches,
                 Communicator* ranks = nullptr) {
  const auto model = make_causal_lm(shape, 5);
  EngineOptions options;
  options.delay = log.delay();
  options.log = [](LogLevel, const std::string&) {};
  options.communicator = ranks;
  Engine engine(*model, config, options);
  const torch::Tensor tokens = torch::arange(24).remainder(64).view({2, 12});
  for (std::int64_t step = 0; step < kSteps; ++step) {
    for (std::int64_t m = 0; m < micro_batches; ++m) {
      const torch::Tensor loss = next_token_loss(model->forward(tokens), tokens, 24);
      const double factor = step == kInfiniteStep ? std::numeric_limits<double>::infinity() : 1;
      engine.backward(loss * factor, {.weight = 24, .last = m + 1 == micro_batches});
    }
    EXPECT_EQ(engine.step().status, step == kInfiniteStep ? StepStatus::not_finite : StepStatus::updated);
  }
  engine.wait_parameters();
  return engine.summary().plan;
}

RecordedRun record(const ModelConfig& shape, const Config& config, std::int64_t micro_batches,
                   const RankPlace& place = {}) {
  const RunPlan plan = plan_run(planned_parameters(shape, config), config, std::nullopt, place);
  RecordOptions options;
  options.steps = kSteps;
  options.micro_batches = micro_batches;
  options.rows = 24;
  for (std::int64_t s = 0; s < kSteps; ++s) options.machine.oracle.first.push_back({1, s != kInfiniteStep});
  return record_run(*plan.layout, plan.spec, *plan.schedule, declared_events(shape), options);
}

class PlannedRun : public testing::TestWithParam<ModelFamily> {};
INSTANTIATE_TEST_SUITE_P(Families, PlannedRun,
                         testing::Values(ModelFamily::llama, ModelFamily::gpt2, ModelFamily::qwen2, ModelFamily::qwen3,
                                         ModelFamily::gemma3),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST_P(PlannedRun, IsWhatTheEngineDoesLaneByLane) {
  int cells = 0;
  for (const ScheduleEntry& schedule : schedules()) {
    for (bool tied : {false, true}) {
      for (DType precision : {DType::f32, DType::bf16}) {
        // A chunk of a grain belongs to one parameter, so that the lanes show the order of gradients itself.
        for (std::int64_t chunk : {1024, 5000, 1 << 20}) {
          for (std::int64_t micro_batches : {1, 3}) {
            SCOPED_TRACE(testing::Message() << schedule.name << " tied " << tied << " " << to_string(precision)
                                            << " chunk " << chunk << " micro-batches " << micro_batches);
            Config config = tiny_config(std::string(schedule.name), 0.5, chunk, 1);
            config.precision = precision;
            config.staging_slots = 2;
            const ModelConfig shape = tiny_model(GetParam(), tied);
            OpLog log;
            const MemoryPlan memory = train(log, shape, config, micro_batches);
            const RecordedRun recorded = record(shape, config, micro_batches);
            EXPECT_GT(test::expect_same_ops(recorded.graph, log), 50U);
            for (Tier tier : {Tier::device, Tier::pinned, Tier::host}) EXPECT_EQ(memory[tier], recorded.memory[tier]);
            if (testing::Test::HasFailure()) return;
            ++cells;
          }
        }
      }
    }
  }
  EXPECT_EQ(cells, static_cast<int>(schedules().size()) * 2 * 2 * 3 * 2);
}

TEST_P(PlannedRun, IsWhatEachOfSeveralRanksDoes) {
  int cells = 0;
  for (const ScheduleEntry& schedule : schedules()) {
    for (int row : {0, 1, 2, 3, 4}) {
      const int stage = row % 3;
      for (std::int64_t bucket : {1, 2}) {
        SCOPED_TRACE(testing::Message() << schedule.name << " stage " << stage << " bucket " << bucket
                                        << (row >= 3 ? " reduced last" : ""));
        Config config = tiny_config(std::string(schedule.name), 0.5, 3000, 1);
        config.stage = stage;
        config.reduce_last_only = row >= 3;
        config.bucket_chunks = bucket;
        config.staging_slots = 2;
        const ModelConfig shape = tiny_model(GetParam(), true);
        test::on_thread_ranks(3, [&](Communicator& ranks) {
          OpLog log;
          const MemoryPlan memory = train(log, shape, config, 2, &ranks);
          const RecordedRun recorded = record(shape, config, 2, {3, ranks.rank(), 3});
          EXPECT_GT(test::expect_same_ops(recorded.graph, log), 50U);
          for (Tier tier : {Tier::device, Tier::pinned, Tier::host}) EXPECT_EQ(memory[tier], recorded.memory[tier]);
        });
        if (testing::Test::HasFailure()) return;
        ++cells;
      }
    }
  }
  EXPECT_EQ(cells, static_cast<int>(schedules().size()) * 5 * 2);
}

TEST_P(PlannedRun, IsWhatTheEngineDoesWithRecomputeAndSumsInTheWorkingType) {
  for (bool tied : {false, true}) {
    SCOPED_TRACE(testing::Message() << "tied " << tied);
    Config config = tiny_config("zero_offload", 0.5, 1024, 1);
    config.precision = DType::bf16;
    config.recompute = true;
    config.low_memory_accumulation = true;
    const ModelConfig shape = tiny_model(GetParam(), tied);
    OpLog log;
    const MemoryPlan memory = train(log, shape, config, 2);
    const RecordedRun recorded = record(shape, config, 2);
    EXPECT_GT(test::expect_same_ops(recorded.graph, log), 50U);
    for (Tier tier : {Tier::device, Tier::pinned, Tier::host}) EXPECT_EQ(memory[tier], recorded.memory[tier]);
  }
}

}  // namespace
}  // namespace spillway
