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

class LifeOnEverySchedule : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, LifeOnEverySchedule, testing::ValuesIn(test::schedule_names()));

// ---- gradients in several parts, and what the program does to parameters --------------------------------------------

/// Computes its input's product again in backward, as a user's checkpointing would: the hook of `weight` fires inside.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               torch::Tensor weight) {
    context->save_for_backward({x, weight});
    return torch::matmul(x, weight.t());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const torch::Tensor x = saved[0].detach().requires_grad_();
    {
      const torch::AutoGradMode on(true);
      torch::autograd::backward({torch::matmul(x, saved[1].t())}, {gradients[0]});
    }
    return {x.grad(), torch::Tensor()};
  }
};

TEST_P(LifeOnEverySchedule, AGradientThatComesInSeveralPartsOfOneBackwardIsTheirSum) {
  for (std::int64_t size : {5, 50}) {  // inside a chunk, and over several
    torch::manual_seed(5);
    torch::nn::Linear used(torch::nn::LinearOptions(size, size).bias(false)), other(size, 3);
    struct Both : torch::nn::Module {
      Both(torch::nn::Linear a, torch::nn::Linear b) {
        register_module("used", std::move(a));
        register_module("other", std::move(b));
      }
    } module(used, other);
    const torch::Tensor x = torch::randn({2, size}, torch::requires_grad());
    const torch::Tensor expected = [&] {
      const torch::Tensor w = used->weight.detach().clone().requires_grad_();
      torch::matmul(torch::tanh(torch::matmul(x.detach(), w.t())), w.t()).sum().backward();
      return w.grad().norm();
    }();
    Config config = plain(GetParam());
    Engine engine(module, config);
    const torch::Tensor y = Recomputed::apply(torch::tanh(Recomputed::apply(x, used->weight)), used->weight);
    engine.backward(y.sum(), {.last = true});
    EXPECT_NEAR(engine.step().grad_norm, expected.item<double>(), 1e-5 * expected.item<double>());
  }
}

TEST_P(LifeOnEverySchedule, WeightsThatTheProgramWritesAreTrainedFrom) {
  const auto model = make_branches();
  Engine engine(*model, plain(GetParam()));
  engine.backward(model->forward(input(1), true, true));
  engine.step();
  engine.wait_parameters();
  {
    const torch::NoGradGuard no_grad;
    model->out->weight.fill_(0.25);
  }
  engine.backward(model->forward(input(2), true, true));
  engine.step();
  EXPECT_NEAR((engine.master("out.weight") - 0.25).abs().max().item<double>(), 0, 0.012);  // one step of lr 0.01 away
}

TEST_P(LifeOnEverySchedule, AParameterThatWasReplacedOrThawedIsRefusedByName) {
  const auto model = make_branches();
  model->b->bias.set_requires_grad(false);
  Engine engine(*model, plain(GetParam()));
  engine.backward(model->forward(input(1), true, true));
  model->b->bias.set_requires_grad(true);
  EXPECT_THROW(engine.step(), StateError);
  model->b->bias.set_requires_grad(false);
  EXPECT_EQ(engine.step().status, StepStatus::updated);
  model->a->weight.set_data(model->a->weight.detach().clone());
  engine.backward(model->forward(input(1), true, true));
  try {
    engine.step();
    FAIL() << "a replaced parameter was accepted";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("a.weight"), std::string::npos) << error.what();
  }
}

TEST_P(LifeOnEverySchedule, TheLearningRateOfAGroupCanBeChanged) {
  const auto model = make_branches();
  Engine engine(*model, plain(GetParam()));
  engine.backward(model->forward(input(1), true, true));
  engine.step();
  const torch::Tensor before = engine.master("out.weight");
  engine.set_lr(0);
  engine.backward(model->forward(input(2), true, true));
  EXPECT_EQ(engine.step().lr, 0);
  EXPECT_TRUE(same_bits(before, engine.master("out.weight")));
  EXPECT_THROW(engine.set_lr(-1), InvalidArgument);
  EXPECT_THROW(engine.set_lr(1, 7), InvalidArgument);
}

TEST(Failure, OfAnOpEndsTheEngineWithItsCauseAndTheModuleKeepsItsWeights) {
  const auto model = make_branches();
  const torch::Tensor before = model->out->weight.detach().clone();
  EngineOptions options;
  options.log = [](LogLevel, const std::string&) {};
  options.delay = [](const std::string& lane, const Op&) {
    if (lane == "d2h") throw std::runtime_error("the link is down");
  };
  {
    Engine engine(*model, plain("zero_offload"), options);
    engine.backward(model->forward(input(1), true, true));
    EXPECT_THROW(engine.step(), std::runtime_error);
    try {
      engine.backward(model->forward(input(1), true, true));
      FAIL() << "a failed engine went on";
    } catch (const StateError& error) {
      EXPECT_NE(std::string(error.what()).find("the link is down"), std::string::npos) << error.what();
    }
  }
  EXPECT_TRUE(same_bits(before, model->out->weight.detach()));
}

// ---- life and misuse -----------------------------------------------------------------------------------------------

TEST_P(LifeOnEverySchedule, TheModuleKeepsTheNewestWeightsAfterItsEngine) {
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

TEST_P(LifeOnEverySchedule, AForwardWithoutGatesSeesTheNewWeights) {
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

TEST_P(LifeOnEverySchedule, GatedBlocksAwaitTheirUploads) {
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

TEST_P(LifeOnEverySchedule, UnusedParametersAreListedOnce) {
  const auto model = make_branches();
  const torch::Tensor before = model->b->weight.detach().clone();
  std::vector<std::string> notices;
  EngineOptions options;
  options.log = [&](LogLevel, const std::string& text) {
    if (text.find("had no gradient") != std::string::npos) notices.push_back(text);
  };
  Config config = plain(GetParam());
  config.clip_norm = 0.1;
  Engine engine(*model, config, options);
  for (int n = 0; n < 10; ++n) {
    engine.backward(model->forward(input(n), true, false), {.last = true});
    EXPECT_EQ(engine.step().status, StepStatus::updated);
  }
  ASSERT_EQ(notices.size(), 1U);
  EXPECT_NE(notices[0].find("2 of 6 trained parameters"), std::string::npos) << notices[0];
  EXPECT_NE(notices[0].find("b.weight, b.bias"), std::string::npos) << notices[0];
  EXPECT_TRUE(same_bits(before, engine.master("b.weight")));
}

TEST_P(LifeOnEverySchedule, MisuseIsRefusedByName) {
  const auto model = make_branches();
  Engine engine(*model, plain(GetParam()));
  EXPECT_THROW(engine.step(), StateError);
  EXPECT_THROW(engine.backward(torch::ones({2}, torch::requires_grad())), InvalidArgument);
  EXPECT_THROW(engine.backward(torch::ones({})), InvalidArgument);
  EXPECT_THROW(engine.backward(model->forward(input(1), true, true).to(torch::kBFloat16)), InvalidArgument);
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

TEST_P(LifeOnEverySchedule, ParametersOfOddShapesAreUpdatedWhole) {
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
