// SPDX-License-Identifier: Apache-2.0
//
// Faults that users of offloaded training systems met in gradients: sums over micro-batches, norms, clipping, values
// that are not finite. docs/field_reports.md says which report each test answers.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/train/engine.h"
#include "support/bits.h"
#include "train/branches.h"
#include "train/double_adam.h"

namespace spillway {
namespace {

using test::Branches;
using test::DoubleAdam;
using test::input;
using test::make_branches;
using test::plain;
using test::same_bits;

class GradientReports : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, GradientReports, testing::ValuesIn(test::schedule_names()));

/// Three layers; the middle weight is larger than a chunk.
struct Mlp : torch::nn::Module {
  Mlp()
      : first(register_module("first", torch::nn::Linear(7, 60))),
        second(register_module("second", torch::nn::Linear(60, 60))),
        third(register_module("third", torch::nn::Linear(60, 1))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = torch::tanh(first(x.to(first->weight.scalar_type())));
    return third(torch::tanh(second(y))).to(torch::kFloat).square().mean();
  }
  torch::nn::Linear first, second, third;
};

std::shared_ptr<Mlp> make_mlp() {
  torch::manual_seed(17);
  return std::make_shared<Mlp>();
}

/// One vector of a given length.
struct Vector : torch::nn::Module {
  explicit Vector(std::int64_t count) { w = register_parameter("w", torch::zeros({count})); }
  torch::Tensor w;
};

std::vector<std::string> names_of(const torch::nn::Module& module) {
  return module.named_parameters().keys();
}

Config standing_still(const std::string& schedule) {
  Config config = plain(schedule);
  config.hyperparameters.lr = 0;
  config.hyperparameters.weight_decay = 0;
  return config;
}

// ---- accumulation --------------------------------------------------------------------------------------------------

TEST_P(GradientReports, TheGradientAfterEachMicroBatchIsTheMeanOfAllSoFar) {
  for (std::int64_t slots : {1, 3}) {
    for (std::int64_t announced : {0, 1, 4, 9}) {  // what the configuration says beside the six there are
      const auto model = make_mlp(), reference = make_mlp();
      Config config = plain(GetParam());
      config.staging_slots = slots;
      config.accumulation = announced;
      Engine engine(*model, config, {.log = [](LogLevel, const std::string&) {}});
      for (int m = 1; m <= 6; ++m) {
        engine.backward(model->forward(input(m)));
        reference->forward(input(m)).backward();
        for (const auto& entry : reference->named_parameters()) {
          const torch::Tensor expected = entry.value().grad() / m;
          EXPECT_LT((engine.gradient(entry.key()) - expected).norm().item<double>(),
                    1e-6 * expected.norm().item<double>())
              << entry.key() << " after " << m << " of an announced " << announced;
        }
      }
      const double norm = torch::nn::utils::clip_grad_norm_(reference->parameters(), 1e9) / 6;
      EXPECT_NEAR(engine.step().grad_norm, norm, 1e-6 * norm);
    }
  }
}

TEST_P(GradientReports, EqualMicroBatchesGiveTheGradientOfOneExactly) {
  const auto model = make_mlp();
  Engine engine(*model, standing_still(GetParam()));
  engine.backward(model->forward(input(3)), {.last = true});
  std::map<std::string, torch::Tensor> one;
  for (const std::string& name : names_of(*model)) one[name] = engine.gradient(name);
  engine.step();
  for (int m = 1; m <= 4; ++m) engine.backward(model->forward(input(3)), {.last = m == 4});
  for (const auto& [name, gradient] : one) EXPECT_TRUE(same_bits(gradient, engine.gradient(name))) << name;
}

// Ways in which a step may end; all leave gradients of a and b behind that the next step must not see.
const std::map<std::string, std::function<void(Engine&, Branches&)>> kEndings = {
    {"updated",
     [](Engine& engine, Branches& model) {
       engine.backward(model.forward(input(1), true, true), {.last = true});
       EXPECT_EQ(engine.step().status, StepStatus::updated);
     }},
    {"not finite",
     [](Engine& engine, Branches& model) {
       engine.backward(model.forward(input(1), true, true) + model.b->bias.sum() * std::nan(""), {.last = true});
       EXPECT_EQ(engine.step().status, StepStatus::not_finite);
     }},
    {"of no weight",
     [](Engine& engine, Branches& model) {
       engine.backward(model.forward(input(1), true, true), {.weight = 0, .last = true});
       EXPECT_EQ(engine.step().status, StepStatus::empty);
     }},
    {"cut short",
     [](Engine& engine, Branches& model) {
       engine.backward(model.forward(input(1), true, true));
       torch::Tensor y = model.a(input(2));
       y.register_hook([](const torch::Tensor&) { throw std::runtime_error("stop"); });
       EXPECT_THROW(engine.backward(model.out(y + model.b(input(2))).mean(), {.last = true}), std::runtime_error);
     }},
    {"profiled",
     [](Engine& engine, Branches& model) { engine.profile([&] { return model.forward(input(1), true, true); }); }}};

TEST_P(GradientReports, NoGradientOfAnEarlierStepIsSeenAgain) {
  const EngineOptions quiet{.log = [](LogLevel, const std::string&) {}};
  const auto fresh = make_branches();
  Engine reference(*fresh, standing_still(GetParam()));
  reference.backward(fresh->forward(input(7), true, false), {.last = true});
  const torch::Tensor expected = reference.gradient("a.weight");
  const double norm = reference.step().grad_norm;
  for (const auto& [ending, end] : kEndings) {
    SCOPED_TRACE("the step before was " + ending);
    const auto model = make_branches();
    Engine engine(*model, standing_still(GetParam()), quiet);
    for (int round = 0; round < 2; ++round) {
      end(engine, *model);
      engine.backward(model->forward(input(7), true, false), {.last = true});
      EXPECT_TRUE(same_bits(engine.gradient("a.weight"), expected));
      EXPECT_FALSE(engine.gradient("b.weight").defined());
      EXPECT_EQ(engine.step().grad_norm, norm);
    }
    EXPECT_EQ(engine.updates("b.weight"), ending == "updated" ? 2 : 0);
    EXPECT_EQ(engine.updates("a.weight"), ending == "updated" ? 4 : 2);
  }
}

TEST_P(GradientReports, Bf16GradientsAreSummedInFp32AndUpdateAnFp32Master) {
  const auto model = make_mlp();
  Config config = plain(GetParam());
  config.precision = DType::bf16;
  Engine engine(*model, config);
  std::map<std::string, torch::Tensor> sums;
  std::map<std::string, DoubleAdam> adam;
  for (const auto& entry : model->named_parameters()) {
    const std::string& name = entry.key();
    adam.emplace(name, engine.master(name));
    entry.value().register_hook([&sums, name](const torch::Tensor& gradient) {
      const HostScope host;
      EXPECT_EQ(gradient.scalar_type(), torch::kBFloat16);
      const torch::Tensor wide = gradient.detach().to(torch::kFloat);
      sums[name] = sums[name].defined() ? sums[name] + wide : wide;
    });
  }
  std::int64_t beyond_bf16 = 0;
  for (int step = 0; step < 5; ++step) {
    sums.clear();
    for (int m = 0; m < 4; ++m) engine.backward(model->forward(input(step * 4 + m)), {.last = m == 3});
    for (auto& [name, sum] : sums) {
      EXPECT_TRUE(same_bits(engine.gradient(name), sum * 0.25F)) << name;
      beyond_bf16 += (sum != sum.to(torch::kBFloat16).to(torch::kFloat)).sum().item<std::int64_t>();
      adam.at(name).step(sum * 0.25F, config.hyperparameters, true);
    }
    engine.step();
    for (const auto& [name, reference] : adam) EXPECT_LT(reference.distance(engine.master(name)), 2e-6) << name;
  }
  EXPECT_GT(beyond_bf16, 10000) << "else sums in bf16 would have passed";
}

// ---- norm and clipping ---------------------------------------------------------------------------------------------

TEST_P(GradientReports, NormsOfLargeGradientsAreFiniteAndClipped) {
  struct Case {
    DType precision;
    double gradient;
    bool low_memory;
  };
  const Case cases[] = {{DType::f16, 5000, false},  {DType::f16, 5000, true},   {DType::bf16, 1e20, false},
                        {DType::bf16, 1e20, true},  {DType::f32, 1e20, false},  {DType::f32, 3e38, false},
                        {DType::f32, 1e-20, false}, {DType::bf16, 3e38, false}, {DType::f16, 60000, false}};
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::Message() << to_string(c.precision) << " " << c.gradient << " low-memory " << c.low_memory);
    Vector model(10);
    Config config = plain(GetParam());
    config.precision = c.precision;
    config.low_memory_accumulation = c.low_memory;
    config.loss_scale.initial = 1;
    config.clip_norm = 1;
    Engine engine(model, config, {.log = [](LogLevel, const std::string&) {}});
    engine.backward((model.w * c.gradient).to(torch::kFloat).sum(), {.weight = 2, .last = true});
    const StepResult result = engine.step();
    EXPECT_EQ(result.status, StepStatus::updated);
    EXPECT_NEAR(result.grad_norm / (c.gradient * std::sqrt(10.0)), 1, c.precision == DType::bf16 ? 4e-3 : 1e-6);
    const double clipped = std::min(c.gradient, 1 / std::sqrt(10.0));
    EXPECT_NEAR(engine.optimizer_state("w", 0)[3].item<double>() / (0.1 * clipped), 1, 4e-3);
  }
}

TEST_P(GradientReports, WhatTheOptimizerGetsHasTheLimitAsItsNorm) {
  for (std::int64_t micro_batches : {1, 3}) {
    for (double limit : {1e-3, 0.02, 1e3, 0.0}) {
      const auto model = make_mlp();
      Config config = plain(GetParam());
      config.clip_norm = limit;
      Engine engine(*model, config);
      for (int m = 0; m < micro_batches; ++m)
        engine.backward(model->forward(input(m)), {.last = m + 1 == micro_batches});
      const double before = engine.step().grad_norm;
      double squares = 0;  // of (1 - beta1) x gradient
      for (const std::string& name : names_of(*model)) {
        squares += engine.optimizer_state(name, 0).to(torch::kDouble).square().sum().item<double>();
      }
      const double expected = limit == 0 ? before : std::min(limit, before);
      EXPECT_NEAR(std::sqrt(squares) / 0.1, expected, 2e-5 * expected) << "limit " << limit;
      EXPECT_EQ(limit > 0 && limit < before, limit == 1e-3 || limit == 0.02) << before;
    }
  }
}

// ---- not finite ----------------------------------------------------------------------------------------------------

using Bad = std::function<torch::Tensor(const Branches& model, int micro_batch)>;

struct Training {
  std::map<std::string, torch::Tensor> state;
  std::vector<double> losses, lr;
  StepResult last;
  std::vector<std::string> messages;
};

/// Six good steps, with three bad ones among them unless `bad` is empty.
Training run_with(const std::string& schedule, DType precision, const Bad& bad) {
  Training out;
  const auto model = make_branches();
  Config config = plain(schedule);
  config.precision = precision;
  config.clip_norm = 0.05;
  config.lr_schedule = {LrScheduleConfig::Kind::linear, 0, 10, 0};
  Engine engine(*model, config, {.log = [&](LogLevel level, const std::string& text) {
    if (level != LogLevel::info) out.messages.push_back(text);
  }});
  const auto step = [&](int number, bool good) {
    for (int m = 0; m < 2; ++m) {
      const torch::Tensor x = input(number * 2 + m).to(model->a->weight.scalar_type());
      torch::Tensor loss = model->out(torch::tanh(model->a(x) + model->b(x))).to(torch::kFloat).mean();
      if (good) out.losses.push_back(loss.item<double>());
      if (!good) loss = loss + bad(*model, m);
      engine.backward(loss, {.last = m == 1});
    }
    out.last = engine.step();
    EXPECT_EQ(out.last.status, good ? StepStatus::updated : StepStatus::not_finite);
    if (good) out.lr.push_back(out.last.lr);
  };
  for (int number = 0; number < 6; ++number) {
    if (bad && (number == 0 || number == 3)) step(100 + number, false);
    if (bad && number == 3) step(200, false);
    step(number, true);
  }
  for (const auto& entry : model->named_parameters()) {
    const std::string& name = entry.key();
    out.state[name] = engine.master(name);
    for (std::int64_t k : {0, 1}) out.state[name + std::to_string(k)] = engine.optimizer_state(name, k);
    out.state[name + " updates"] = torch::tensor(engine.updates(name));
    engine.wait_parameters();
    out.state[name + " working"] = entry.value().detach().clone();
  }
  return out;
}

torch::Tensor one_element(const Branches& model, double gradient) {
  return model.b->weight.flatten().slice(0, 90, 91).sum().to(torch::kFloat) * gradient;
}

TEST_P(GradientReports, AStepThatIsNotFiniteIsAsIfItHadNeverBeen) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::map<std::string, Bad> kinds = {
      {"one infinity in the last micro-batch",
       [](const Branches& model, int m) { return one_element(model, m == 1 ? kInfinity : 0); }},
      {"one NaN in the first micro-batch",
       [](const Branches& model, int m) { return one_element(model, m == 0 ? std::nan("") : 0); }},
      {"infinities that cancel to NaN",
       [](const Branches& model, int m) { return one_element(model, m == 0 ? kInfinity : -kInfinity); }},
      {"finite gradients whose sum overflows", [](const Branches& model, int) { return one_element(model, 3e38); }}};
  for (DType precision : {DType::f32, DType::bf16}) {
    const Training expected = run_with(GetParam(), precision, {});
    EXPECT_EQ(expected.last.skipped, 0);
    for (const auto& [what, bad] : kinds) {
      SCOPED_TRACE(testing::Message() << to_string(precision) << ", " << what);
      const Training actual = run_with(GetParam(), precision, bad);
      for (const auto& [name, value] : expected.state) EXPECT_TRUE(same_bits(value, actual.state.at(name))) << name;
      EXPECT_EQ(expected.losses, actual.losses);
      EXPECT_EQ(expected.lr, actual.lr);
      EXPECT_EQ(actual.last.skipped, 3);
      EXPECT_EQ(actual.last.step, 6);
      ASSERT_EQ(actual.messages.size(), 1u) << "one line for the first, the next after ten";
      EXPECT_NE(actual.messages[0].find("b.weight"), std::string::npos) << actual.messages[0];
      EXPECT_EQ(actual.messages[0].find("scale"), std::string::npos) << actual.messages[0];
    }
  }
}

TEST_P(GradientReports, TheVerdictWaitsForTheSlowestGradient) {
  for (const std::string& late : names_of(*make_branches())) {
    const auto model = make_branches();
    EngineOptions options;
    options.log = [](LogLevel, const std::string&) {};
    options.delay = [](const std::string& lane, const Op&) {
      if (lane != "compute") std::this_thread::sleep_for(std::chrono::milliseconds(4));
    };
    Engine engine(*model, plain(GetParam()), options);
    for (int round = 0; round < 2; ++round) {
      const torch::Tensor before = engine.master(late);
      const torch::Tensor bad = model->named_parameters()[late].flatten().slice(0, 0, 1).sum() * std::nan("");
      engine.backward(model->forward(input(1), true, true) + bad, {.last = true});
      EXPECT_EQ(engine.step().status, StepStatus::not_finite) << late;
      EXPECT_TRUE(same_bits(before, engine.master(late)));
      engine.backward(model->forward(input(2), true, true), {.last = true});
      EXPECT_EQ(engine.step().status, StepStatus::updated);
    }
  }
}

}  // namespace
}  // namespace spillway
