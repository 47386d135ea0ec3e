// SPDX-License-Identifier: Apache-2.0
//
// Reading and setting states by name, groups in code, update rules of the program's own.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "spillway/core/error.h"
#include "spillway/train/engine.h"
#include "support/bits.h"
#include "train/branches.h"

namespace spillway {
namespace {

using test::input;
using test::make_branches;
using test::plain;
using test::same_bits;

class StateOnEverySchedule : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, StateOnEverySchedule, testing::ValuesIn(test::schedule_names()));

const std::vector<std::string> kNames = {"a.weight", "a.bias", "b.weight", "b.bias", "out.weight", "out.bias"};

StepResult one_step(Engine& engine, test::Branches& model, std::int64_t number) {
  engine.backward(model.forward(input(number), true, true), {.last = true});
  return engine.step();
}

// ---- by name -------------------------------------------------------------------------------------------------------

TEST_P(StateOnEverySchedule, AllStateCopiedByNameIntoAFreshEngineGoesOnBitForBit) {
  for (DType precision : {DType::f32, DType::bf16, DType::f16}) {
    Config config = plain(GetParam());
    config.precision = precision;
    config.loss_scale.initial = 256;
    const auto first = make_branches(), second = make_branches();
    for (torch::Tensor& p : second->parameters()) p.detach().zero_();
    Engine from(*first, config), to(*second, config);
    const auto step = [&](Engine& engine, test::Branches& model, std::int64_t n) {
      const auto type = precision == DType::f32 ? torch::kFloat : model.a->weight.scalar_type();
      torch::Tensor sum = torch::tanh(model.a(input(n).to(type)) + model.b(input(n).to(type)));
      engine.backward(model.out(sum).mean().to(torch::kFloat), {.last = true});
      engine.step();
    };
    for (int n = 0; n < 3; ++n) step(from, *first, n);
    for (const std::string& name : kNames) {
      to.set_weight(name, from.master(name));
      for (std::int64_t k : {0, 1}) to.set_optimizer_state(name, k, from.optimizer_state(name, k));
      to.set_updates(name, from.updates(name));
    }
    for (int n = 3; n < 6; ++n) {
      step(from, *first, n);
      step(to, *second, n);
    }
    for (const std::string& name : kNames) {
      EXPECT_TRUE(same_bits(from.master(name), to.master(name))) << name;
      EXPECT_TRUE(same_bits(from.optimizer_state(name, 1), to.optimizer_state(name, 1))) << name;
    }
    from.wait_parameters();
    to.wait_parameters();
    EXPECT_TRUE(same_bits(first->out->weight.detach(), second->out->weight.detach()));
  }
}

TEST_P(StateOnEverySchedule, GradientsAreReadAsLibTorchWouldHaveThem) {
  const auto model = make_branches(), reference = make_branches();
  Engine engine(*model, plain(GetParam()));
  EXPECT_FALSE(engine.gradient("a.weight").defined());
  engine.backward(model->forward(input(1), true, false), {.weight = 3});
  engine.backward(model->forward(input(2), true, false), {.weight = 1, .last = true});
  ((reference->forward(input(1), true, false) * 3 + reference->forward(input(2), true, false)) / 4).backward();
  EXPECT_TRUE(torch::allclose(engine.gradient("a.weight"), reference->a->weight.grad(), 1e-5, 1e-8));
  EXPECT_FALSE(engine.gradient("b.weight").defined());
  engine.step();
  EXPECT_FALSE(engine.gradient("a.weight").defined()) << "a step spends its gradients";
}

TEST_P(StateOnEverySchedule, ASetGradientIsTheOneThatIsClippedCheckedAndUsed) {
  const auto model = make_branches(), reference = make_branches();
  Config config = plain(GetParam());
  config.clip_norm = 0.5;
  Engine engine(*model, config), other(*reference, config);
  engine.backward(model->forward(input(1), true, true), {.last = true});
  for (const std::string& name : kNames) engine.set_gradient(name, torch::zeros_like(engine.master(name)));
  engine.set_gradient("out.bias", torch::full({1}, 3.0));
  EXPECT_TRUE(same_bits(engine.gradient("out.bias"), torch::full({1}, 3.0)));
  const torch::Tensor before = engine.master("out.weight");
  EXPECT_EQ(engine.step().grad_norm, 3.0);
  // Zero gradients: decay alone. Adam's first moment of the set one is (1 - beta1) x clipped gradient.
  EXPECT_TRUE(torch::allclose(engine.master("out.weight"), before * (1 - 1e-4), 1e-6));
  EXPECT_NEAR(engine.optimizer_state("out.bias", 0).item<float>(), 0.1F * 0.5F, 1e-6);

  engine.backward(model->forward(input(2), true, true), {.last = true});
  engine.set_gradient("a.bias", torch::full({13}, std::numeric_limits<float>::quiet_NaN()));
  EXPECT_EQ(engine.step().status, StepStatus::not_finite);
}

TEST_P(StateOnEverySchedule, AGradientGivenToAParameterWithoutOneIsHonoured) {
  const auto model = make_branches();
  Engine engine(*model, plain(GetParam()));
  EXPECT_THROW(engine.set_gradient("b.bias", torch::ones({13})), StateError);
  engine.backward(model->forward(input(1), true, false), {.last = true});
  engine.set_gradient("b.bias", torch::ones({13}));
  engine.step();
  EXPECT_EQ(engine.updates("b.bias"), 1);
  EXPECT_EQ(engine.updates("b.weight"), 0);
}

TEST_P(StateOnEverySchedule, WhatIsSetIsChecked) {
  const auto model = make_branches();
  model->b->bias.set_requires_grad(false);
  Engine engine(*model, plain(GetParam()));
  EXPECT_THROW(engine.set_weight("a.weight", torch::zeros({7, 13})), InvalidArgument);
  EXPECT_THROW(engine.set_weight("a.weight", torch::zeros({13, 7}, torch::kLong)), InvalidArgument);
  EXPECT_THROW(engine.set_weight("a.wieght", torch::zeros({13, 7})), InvalidArgument);
  EXPECT_THROW(engine.set_optimizer_state("a.weight", 2, torch::zeros({13, 7})), InvalidArgument);
  EXPECT_THROW(engine.set_updates("a.weight", -1), InvalidArgument);
  engine.set_weight("b.bias", torch::full({13}, 2.0, torch::kDouble));  // frozen: it has a weight all the same
  EXPECT_TRUE(same_bits(engine.weight("b.bias"), torch::full({13}, 2.0F)));
  EXPECT_TRUE(same_bits(model->b->bias.detach(), torch::full({13}, 2.0F)));
}

TEST_P(StateOnEverySchedule, AParameterFrozenLateStandsStillWithItsStates) {
  const auto model = make_branches();
  Engine engine(*model, plain(GetParam()));
  one_step(engine, *model, 1);
  const torch::Tensor weight = engine.master("a.weight"), moment = engine.optimizer_state("a.weight", 0);
  model->a->weight.set_requires_grad(false);
  one_step(engine, *model, 2);
  EXPECT_TRUE(same_bits(weight, engine.master("a.weight")));
  EXPECT_TRUE(same_bits(moment, engine.optimizer_state("a.weight", 0)));
  EXPECT_EQ(engine.updates("a.weight"), 1);
  EXPECT_EQ(engine.updates("a.bias"), 2);
  model->a->weight.set_requires_grad(true);  // it has its states still
  one_step(engine, *model, 3);
  EXPECT_EQ(engine.updates("a.weight"), 2);
}

// ---- groups --------------------------------------------------------------------------------------------------------

TEST_P(StateOnEverySchedule, GroupsInCodeComeBeforeThoseOfTheConfigurationAndCanBeChanged) {
  const auto model = make_branches();
  Config config = plain(GetParam());
  GroupConfig biases;
  biases.match = "*.bias";
  biases.lr = 0.5;
  config.groups = {biases};
  EngineOptions options;
  GroupConfig slow;
  slow.lr = 0;
  slow.weight_decay = 0;
  options.groups.push_back(
      {[](const std::string& name, const torch::Tensor& p) { return p.dim() == 1 && name[0] == 'a'; }, slow});
  Engine engine(*model, config, options);
  EXPECT_EQ(engine.group_of("a.weight"), 0u);
  EXPECT_EQ(engine.group_of("b.bias"), 1u);
  EXPECT_EQ(engine.group_of("a.bias"), 2u);
  EXPECT_EQ(engine.hyperparameters(1).lr, 0.5);
  const torch::Tensor before = engine.master("a.bias");
  one_step(engine, *model, 1);
  EXPECT_TRUE(same_bits(before, engine.master("a.bias")));
  Hyperparameters changed = engine.hyperparameters(2);
  changed.lr = 1e-2;
  changed.beta1 = 0;
  engine.set_hyperparameters(changed, 2);
  engine.backward(model->forward(input(2), true, true), {.last = true});
  const torch::Tensor gradient = engine.gradient("a.bias");
  engine.step();
  EXPECT_FALSE(same_bits(before, engine.master("a.bias")));
  EXPECT_TRUE(same_bits(engine.optimizer_state("a.bias", 0), gradient)) << "beta1 is 0 now";
  changed.beta2 = 1;
  EXPECT_THROW(engine.set_hyperparameters(changed, 2), InvalidArgument);
  EXPECT_THROW(engine.set_hyperparameters(changed, 3), InvalidArgument);
  EXPECT_THROW(engine.hyperparameters(3), InvalidArgument);
}

// ---- own update rules ----------------------------------------------------------------------------------------------

// Sign descent with momentum in the first state, and a count in the second: whole-tensor arithmetic.
void sign_descent(ParameterUpdate& update) {
  update.states[0].mul_(0.5).add_(update.gradient);
  update.states[1].fill_(static_cast<double>(update.update));
  update.master.sub_(update.states[0] / (update.states[0].norm() + 1e-3), update.hyperparameters.lr);
}

TEST_P(StateOnEverySchedule, AnOwnUpdateRuleIsUsedForItsParametersAlone) {
  for (std::int64_t chunk : {1024, 1 << 20}) {
    for (DType precision : {DType::f32, DType::bf16}) {
      struct Wide : torch::nn::Module {
        Wide()
            : in(register_module("in", torch::nn::Linear(8, 600))),
              out(register_module("out", torch::nn::Linear(600, 8))) {}
        torch::Tensor forward(const torch::Tensor& x) {
          return out(torch::tanh(in(x))).to(torch::kFloat).square().mean();
        }
        torch::nn::Linear in, out;
      };
      torch::manual_seed(4);
      Wide model, reference;
      {
        const torch::NoGradGuard no_grad;
        for (std::size_t i = 0; i < model.parameters().size(); ++i)
          reference.parameters()[i].copy_(model.parameters()[i]);
      }
      Config config = plain(GetParam());
      config.chunk_elements = chunk;
      config.precision = precision;
      config.low_memory_accumulation = precision == DType::bf16;
      config.clip_norm = 0.1;
      EngineOptions options;
      options.log = [](LogLevel, const std::string&) {};
      const auto matrices = [](const std::string&, const torch::Tensor& p) { return p.dim() == 2; };
      std::atomic<int> calls{0};
      options.updates.push_back({matrices, [&](ParameterUpdate& update) {
                                   ++calls;
                                   EXPECT_EQ(update.gradient.scalar_type(), torch::kFloat);
                                   sign_descent(update);
                                 }});
      Engine engine(model, config, options);
      Engine plain_engine(reference, config, {.log = options.log});
      const auto type = precision == DType::f32 ? torch::kFloat : torch::kBFloat16;
      const torch::Tensor x = torch::sin(torch::arange(32.0)).reshape({4, 8}).to(type);
      torch::Tensor weight = engine.master("out.weight"), momentum = torch::zeros_like(weight);
      for (int step = 1; step <= 3; ++step) {
        engine.backward(model.forward(x), {.last = true});
        torch::Tensor gradient = engine.gradient("out.weight");
        const StepResult result = engine.step();
        gradient = gradient * static_cast<float>(std::min(1.0, 0.1 / (result.grad_norm + 1e-6)));
        momentum = momentum * 0.5 + gradient;
        weight = weight - 1e-2 * momentum / (momentum.norm() + 1e-3);
        EXPECT_TRUE(torch::allclose(weight, engine.master("out.weight"), 1e-5, 1e-6)) << "step " << step;
        EXPECT_EQ(engine.optimizer_state("in.weight", 1).mean().item<float>(), static_cast<float>(step));
        engine.wait_parameters();
        EXPECT_TRUE(same_bits(model.out->weight.detach(), engine.master("out.weight").to(type)));
      }
      EXPECT_EQ(calls, 6);
      plain_engine.backward(reference.forward(x), {.last = true});
      plain_engine.step();
      EXPECT_NE(plain_engine.optimizer_state("in.weight", 1).mean().item<float>(), 1.0F) << "the rule is not its";
    }
  }
}

TEST_P(StateOnEverySchedule, AnOwnRuleThatThrowsEndsTheEngineWithItsMessage) {
  const auto model = make_branches();
  EngineOptions options;
  options.log = [](LogLevel, const std::string&) {};
  const auto all = [](const std::string& name, const torch::Tensor&) { return name == "b.weight"; };
  options.updates.push_back({all, [](ParameterUpdate&) { throw std::runtime_error("my rule is wrong"); }});
  Engine engine(*model, plain(GetParam()), options);
  try {
    one_step(engine, *model, 1);
    engine.wait_parameters();
    FAIL() << "the rule's exception was lost";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("my rule is wrong"), std::string::npos) << error.what();
  }
  EngineOptions nothing;
  nothing.updates.push_back({[](const std::string&, const torch::Tensor&) { return false; }, [](ParameterUpdate&) {}});
  const auto other = make_branches();
  EXPECT_THROW(Engine(*other, plain(GetParam()), nothing), InvalidArgument);
}

}  // namespace
}  // namespace spillway
