// SPDX-License-Identifier: Apache-2.0
#include "spillway/train/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "spillway/core/error.h"
#include "support/bits.h"
#include "train/training_runs.h"

namespace spillway {
namespace {

using test::same_bits;
using test::tiny_config;
using test::tiny_llama;

/// Two independent linear maps and a third that both lead into.
struct Branches : torch::nn::Module {
  Branches()
      : a(register_module("a", torch::nn::Linear(7, 13))),
        b(register_module("b", torch::nn::Linear(7, 13))),
        out(register_module("out", torch::nn::Linear(13, 1))) {}
  torch::Tensor forward(const torch::Tensor& x, bool use_a, bool use_b) {
    torch::Tensor sum = torch::zeros({x.size(0), 13});
    if (use_a) sum = sum + a(x);
    if (use_b) sum = sum + b(x);
    return out(torch::tanh(sum)).mean();
  }
  torch::nn::Linear a, b, out;
};

std::shared_ptr<Branches> make_branches() {
  torch::manual_seed(11);
  return std::make_shared<Branches>();
}

torch::Tensor input(std::int64_t number) {
  return torch::sin(torch::arange(28, torch::kFloat) * 0.37 + static_cast<double>(number)).reshape({4, 7});
}

Config plain(const std::string& schedule) {
  Config config = tiny_config(schedule, 0, 1024, 1);
  config.groups.clear();
  config.hyperparameters = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
  return config;
}

std::vector<std::string> messages;
LogHandler collect_messages() {
  messages.clear();
  return [](LogLevel, const std::string& text) { messages.push_back(text); };
}

class OnEverySchedule : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, OnEverySchedule, testing::Values("resident", "zero_offload"));

// ---- accumulation --------------------------------------------------------------------------------------------------

TEST_P(OnEverySchedule, AnyNumberOfBackwardsBeforeAStepIsSummedWhateverIsConfigured) {
  const auto model = make_branches(), reference = make_branches();
  Config config = plain(GetParam());
  config.accumulation = 1;
  Engine engine(*model, config);
  torch::optim::AdamW optimizer(reference->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.01));
  std::int64_t number = 0;
  for (std::int64_t backwards : {3, 5, 1}) {
    optimizer.zero_grad();
    for (std::int64_t i = 0; i < backwards; ++i, ++number) {
      engine.backward(model->forward(input(number), true, true));
      (reference->forward(input(number), true, true) / static_cast<double>(backwards)).backward();
    }
    engine.step();
    optimizer.step();
    for (const auto& entry : reference->named_parameters()) {
      EXPECT_TRUE(torch::allclose(engine.master(entry.key()), entry.value(), 1e-5, 1e-6))
          << entry.key() << " after " << backwards;
    }
  }
}

TEST_P(OnEverySchedule, AParameterWithGradientsInSomeMicroBatchesOnlyHasTheirSum) {
  const auto model = make_branches(), reference = make_branches();
  Engine engine(*model, plain(GetParam()));
  torch::optim::AdamW optimizer(reference->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.01));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const std::pair<bool, bool> used[] = {{true, true}, {true, false}, {false, true}};
    for (int m = 0; m < 3; ++m) {
      engine.backward(model->forward(input(step * 3 + m), used[m].first, used[m].second), {.last = m == 2});
      (reference->forward(input(step * 3 + m), used[m].first, used[m].second) / 3).backward();
    }
    const double expected_norm = torch::nn::utils::clip_grad_norm_(reference->parameters(), 1e9);
    EXPECT_NEAR(engine.step().grad_norm, expected_norm, 1e-5 * expected_norm);
    optimizer.step();
  }
  for (const auto& entry : reference->named_parameters()) {
    EXPECT_TRUE(torch::allclose(engine.master(entry.key()), entry.value(), 1e-5, 1e-6)) << entry.key();
  }
}

TEST_P(OnEverySchedule, FourEqualMicroBatchesGiveTheNormOfOne) {
  const auto model = make_branches();
  Engine engine(*model, plain(GetParam()));
  engine.backward(model->forward(input(1), true, true));
  const double one = engine.step().grad_norm;
  const auto again = make_branches();
  Engine second(*again, plain(GetParam()));
  for (int i = 0; i < 4; ++i) second.backward(again->forward(input(1), true, true));
  EXPECT_DOUBLE_EQ(second.step().grad_norm, one);
}

TEST_P(OnEverySchedule, WeightsAreRelativeToTheirSum) {
  const auto model = make_branches(), reference = make_branches();
  Engine engine(*model, plain(GetParam()));
  engine.backward(model->forward(input(1), true, true), {.weight = 3});
  engine.backward(model->forward(input(2), true, true), {.weight = 1});
  const double norm = engine.step().grad_norm;
  (reference->forward(input(1), true, true) * 0.75 + reference->forward(input(2), true, true) * 0.25).backward();
  EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(reference->parameters(), 1e9), 1e-6);
}

// ---- parameters without a gradient ---------------------------------------------------------------------------------

TEST_P(OnEverySchedule, AParameterWithoutAGradientStandsStillWithItsCounter) {
  const auto model = make_branches();
  Engine engine(*model, plain(GetParam()));
  const torch::Tensor before = engine.master("b.weight");
  engine.backward(model->forward(input(1), true, false));
  engine.step();
  EXPECT_TRUE(same_bits(before, engine.master("b.weight")));
  EXPECT_EQ(engine.updates("a.weight"), 1);
  EXPECT_EQ(engine.updates("b.weight"), 0);
  // Its first update has the bias correction of a first step: lr x sign(g), beside the decay.
  engine.backward(model->forward(input(2), true, true));
  engine.step();
  const torch::Tensor change = (engine.master("b.weight") - before * (1 - 1e-2 * 0.01)).abs();
  EXPECT_NEAR(change.min().item<double>(), 1e-2, 1e-5);
  EXPECT_NEAR(change.max().item<double>(), 1e-2, 1e-5);
  EXPECT_EQ(engine.updates("b.weight"), 1);
}

TEST_P(OnEverySchedule, FrozenParametersHaveNoStatesAndNeverChange) {
  const auto model = make_branches();
  model->a->weight.set_requires_grad(false);
  model->a->bias.set_requires_grad(false);
  const torch::Tensor before = model->a->weight.clone();
  const Bytes states = plan_memory(
      *make_branches(), plain(GetParam()))[std::string(GetParam()) == "resident" ? Tier::device : Tier::pinned]
                                          [MemoryUse::optimizer_states];
  {
    Engine engine(*model, plain(GetParam()));
    for (int i = 0; i < 3; ++i) {
      engine.backward(model->forward(input(i), true, true));
      engine.step();
    }
    const EngineSummary summary = engine.summary();
    EXPECT_LT((summary.plan[Tier::device][MemoryUse::optimizer_states] +
               summary.plan[Tier::pinned][MemoryUse::optimizer_states])
                  .value,
              states.value);
    EXPECT_THROW(engine.master("a.weight"), InvalidArgument);
  }
  EXPECT_TRUE(same_bits(before, model->a->weight));
}

// ---- not finite ----------------------------------------------------------------------------------------------------

TEST_P(OnEverySchedule, ANonFiniteStepChangesNothingAndSaysWhere) {
  for (const double bad : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    const auto model = make_branches();
    Config config = plain(GetParam());
    config.lr_schedule = {LrScheduleConfig::Kind::linear, 0, 10, 0};
    EngineOptions options;
    options.log = collect_messages();
    Engine engine(*model, config, options);
    std::vector<StepStatus> statuses;
    for (int step = 1; step <= 6; ++step) {
      const torch::Tensor p = engine.master("b.weight"), m = engine.optimizer_state("b.weight", 0),
                          v = engine.optimizer_state("b.weight", 1);
      torch::Tensor loss = model->forward(input(step), true, true);
      if (step == 3 || step == 4) loss = loss + model->b->bias.slice(0, 0, 1).sum() * bad;
      engine.backward(loss, {.last = true});
      const StepResult result = engine.step();
      statuses.push_back(result.status);
      if (result.status == StepStatus::not_finite) {
        EXPECT_TRUE(same_bits(p, engine.master("b.weight")));
        EXPECT_TRUE(same_bits(m, engine.optimizer_state("b.weight", 0)));
        EXPECT_TRUE(same_bits(v, engine.optimizer_state("b.weight", 1)));
      }
      if (step == 6) {
        EXPECT_EQ(result.step, 4);
        EXPECT_EQ(result.skipped, 2);
        EXPECT_NEAR(result.lr, 1e-2 * 0.7, 1e-12);  // the fourth update: three came before it
      }
    }
    using S = StepStatus;
    EXPECT_EQ(statuses, (std::vector<S>{S::updated, S::updated, S::not_finite, S::not_finite, S::updated, S::updated}));
    ASSERT_GE(messages.size(), 1U);
    const std::string warning = messages.back();
    EXPECT_NE(warning.find("b.bias"), std::string::npos) << warning;
    EXPECT_NE(warning.find(std::isnan(bad) ? "1 NaN" : "1 infinite"), std::string::npos) << warning;
    EXPECT_EQ(warning.find("scale"), std::string::npos) << "fp32 has no loss scale: " << warning;
  }
}

// ---- life and misuse -----------------------------------------------------------------------------------------------

TEST_P(OnEverySchedule, TheModuleKeepsTheNewestWeightsAfterItsEngine) {
  const auto model = make_branches();
  torch::Tensor master;
  {
    Engine engine(*model, plain(GetParam()));
    engine.backward(model->forward(input(1), true, true));
    engine.step();
    master = engine.master("out.weight");
  }
  EXPECT_TRUE(same_bits(master, model->out->weight.detach()));
  model->forward(input(1), true, true).backward();  // an ordinary module again
  EXPECT_TRUE(model->out->weight.grad().defined());
}

TEST_P(OnEverySchedule, AForwardWithoutGatesSeesTheNewWeights) {
  const auto model = make_branches();
  Config config = plain(GetParam());
  config.device.upload_bandwidth = 200e3;  // slow enough that pending uploads would show
  Engine engine(*model, config);
  engine.backward(model->forward(input(1), true, true));
  engine.step();
  EXPECT_TRUE(same_bits(engine.master("out.weight"), model->out->weight.detach()));
  const torch::Tensor here = model->a->weight.detach().clone();
  engine.wait_parameters();
  EXPECT_TRUE(same_bits(here, model->a->weight.detach()));
}

TEST_P(OnEverySchedule, GatedBlocksAwaitTheirUploads) {
  const auto model = make_branches();
  Config config = plain(GetParam());
  config.device.upload_bandwidth = 200e3;
  Engine engine(*model, config);
  for (int step = 0; step < 3; ++step) {
    const torch::Tensor a = engine.call(model->a, input(step));
    const torch::Tensor master = engine.master("a.weight");  // awaits everything: read it after the gate
    EXPECT_TRUE(same_bits(torch::linear(input(step), master, engine.master("a.bias")), a.detach()));
    const torch::Tensor loss = engine.call(*model->out, torch::tanh(a)).mean();
    engine.backward(loss, {.last = true});
    engine.step();
  }
}

TEST_P(OnEverySchedule, MisuseIsRefusedByName) {
  const auto model = make_branches();
  Engine engine(*model, plain(GetParam()));
  EXPECT_THROW(engine.step(), StateError);
  EXPECT_THROW(engine.backward(torch::ones({2}, torch::requires_grad())), InvalidArgument);
  EXPECT_THROW(engine.backward(torch::ones({})), InvalidArgument);
  EXPECT_THROW(engine.backward(model->forward(input(1), true, true), {.weight = -1}), InvalidArgument);
  EXPECT_THROW(engine.backward(model->forward(input(1), true, true), {.weight = std::nan("")}), InvalidArgument);
  try {
    model->forward(input(1), true, true).backward();
    FAIL() << "a backward past the engine was accepted";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("engine.backward"), std::string::npos);
  }
  try {
    engine.master("out.wieght");
    FAIL() << "an unknown name was accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("out.weight"), std::string::npos);
  }
  EXPECT_THROW(Engine(*model, plain(GetParam())), InvalidArgument);  // two engines on one module
}

struct Shared : torch::nn::Module {
  Shared() {
    const torch::Tensor whole = torch::randn({4, 4});
    register_parameter("first", whole);
    register_parameter("second", whole.detach()[0]);
  }
};

struct SparseEmbedding : torch::nn::Module {
  SparseEmbedding()
      : table(register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(16, 4).sparse(true)))) {}
  torch::nn::Embedding table;
};

TEST(Parameters, WhatCannotBeTrainedIsRefusedByName) {
  Shared shared;
  try {
    Engine engine(shared, plain("resident"));
    FAIL() << "overlapping parameters were accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("first and second"), std::string::npos) << error.what();
  }
  SparseEmbedding sparse;
  Engine engine(sparse, plain("resident"));
  try {
    engine.backward(sparse.table(torch::arange(3)).sum());
    FAIL() << "a sparse gradient was accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("table.weight"), std::string::npos) << error.what();
  }
  auto halves = make_branches();
  halves->to(torch::kBFloat16);
  EXPECT_THROW(Engine(*halves, plain("resident")), InvalidArgument);
}

struct OddShapes : torch::nn::Module {
  OddShapes() {
    register_parameter("scalar", torch::tensor(0.5F));
    register_parameter("empty", torch::zeros({0, 3}));
    register_parameter("cube", torch::randn({2, 3, 5, 7}));
    register_parameter("transposed", torch::randn({33, 70}).t());
    register_parameter("part", torch::randn({8, 700})[1]);
  }
  torch::Tensor forward() {
    torch::Tensor sum = torch::zeros({});
    for (const torch::Tensor& p : parameters()) sum = sum + (p * p).sum();
    return sum;
  }
};

TEST_P(OnEverySchedule, ParametersOfOddShapesAreUpdatedWhole) {
  torch::manual_seed(3);
  OddShapes model;
  Engine engine(model, plain(GetParam()));
  std::vector<torch::Tensor> before;
  for (const torch::Tensor& p : model.parameters()) before.push_back(p.detach().clone());
  engine.backward(model.forward());
  engine.step();
  engine.wait_parameters();
  for (std::size_t i = 0; i < before.size(); ++i) {
    const torch::Tensor p = model.parameters()[i].detach();
    EXPECT_EQ(p.sizes(), before[i].sizes());
    // lr x sign(g) beside the decay, in every element
    EXPECT_TRUE(torch::allclose(p, before[i] * (1 - 1e-4) - 1e-2 * before[i].sign(), 1e-4, 1e-6)) << i;
  }
}

}  // namespace
}  // namespace spillway
