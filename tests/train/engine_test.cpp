// SPDX-License-Identifier: Apache-2.0
#include "spillway/train/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "spillway/core/error.h"
#include "support/bits.h"
#include "train/branches.h"

namespace spillway {
namespace {

using test::Branches;
using test::input;
using test::make_branches;
using test::plain;
using test::same_bits;

std::vector<std::string> messages;
LogHandler collect_messages() {
  messages.clear();
  return [](LogLevel level, const std::string& text) {
    if (level != LogLevel::info) messages.push_back(text);
  };
}

class OnEverySchedule : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, OnEverySchedule, testing::ValuesIn(test::schedule_names()));

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
      *make_branches(),
      plain(GetParam()))[GetParam() == "resident" ? Tier::device : Tier::pinned][MemoryUse::optimizer_states];
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
    ASSERT_EQ(messages.size(), 1U);  // one line for both
    const std::string warning = messages.back();
    EXPECT_NE(warning.find("b.bias"), std::string::npos) << warning;
    EXPECT_NE(warning.find(std::isnan(bad) ? "1 NaN" : "1 infinite"), std::string::npos) << warning;
    EXPECT_EQ(warning.find("scale"), std::string::npos) << "fp32 has no loss scale: " << warning;
  }
}

}  // namespace
}  // namespace spillway
